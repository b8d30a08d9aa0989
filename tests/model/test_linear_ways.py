"""Which way a model's products take on which device."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxpaged.kernels.choose import AttentionPath, Device
from mlxpaged.kernels.products import ProductKind
from mlxpaged.kernels.timing import PathChoice
from mlxpaged.model.linear_ways import linear_ways, product_kinds

from ..emulator import FORWARD, EmulatorLauncher, require_tools


def path_on(kind: str, launcher: object) -> AttentionPath:
    return AttentionPath(launcher, PathChoice(), Device(kind, "a device"), "a test")  # type: ignore[arg-type]


def model_of(dtype: mx.Dtype = mx.bfloat16, bits: int | None = None) -> nn.Module:
    model = nn.Sequential(nn.Embedding(40, 128), nn.Linear(128, 64), nn.RMSNorm(64), nn.Linear(64, 24))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    return model


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (model_of(), [ProductKind("bfloat16")]),
        (model_of(mx.float32), []),
        (model_of(bits=4), [ProductKind("bfloat16", 4, 64)]),  # a width of 64 is too narrow for one of them
        (model_of(mx.float16, 8), [ProductKind("float16", 8, 64)]),
        (model_of(bits=3), []),
    ],
)
def test_the_kinds_of_a_models_products(model: nn.Module, kinds: list[ProductKind]) -> None:
    assert product_kinds(model) == kinds


def test_on_cuda_few_rows_of_packed_or_small_weights_take_our_kernel() -> None:
    require_tools()
    warned: list[str] = []
    ways = linear_ways(model_of(), path_on("cuda", EmulatorLauncher(passes=(FORWARD,))), warned.append)
    assert ways is not None and ways.skinny is not None and not warned
    assert ways.join and ways.dense_above
    faster = ways.skinny.faster
    assert faster(32, 4096, 4096, 0) and faster(16, 28672, 4096, 0) and faster(32, 28672, 4096, 4)
    assert not faster(32, 28672, 4096, 0)


def test_a_kernel_that_fails_is_not_used_and_that_is_said() -> None:
    def launch(*_: object, **__: object) -> list[object]:
        raise RuntimeError("no such instruction")

    warned: list[str] = []
    ways = linear_ways(model_of(), path_on("cuda", launch), warned.append)
    assert ways is not None and ways.skinny is None and ways.join
    (line,) = warned
    assert line.startswith("products of few rows are left to MLX on a device: skinny_matmul failed on 2 rows")


@pytest.mark.parametrize(("kind", "launcher"), [("cpu", None), ("metal", object())])
def test_elsewhere_products_stay_mlxs(kind: str, launcher: object) -> None:
    assert linear_ways(model_of(), path_on(kind, launcher), pytest.fail) is None
