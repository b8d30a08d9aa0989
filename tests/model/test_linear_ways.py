"""Which way a model's products take on which device."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxpaged.kernels.choose import AttentionPath, Device
from mlxpaged.kernels.products import Product, ProductChoice, ProductKind, ProductTime
from mlxpaged.kernels.timing import PathChoice
from mlxpaged.model import linear_ways as linear_ways_module
from mlxpaged.model.linear_ways import linear_ways, products_of

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
    ("model", "products"),
    [
        (
            model_of(),
            {
                (ProductKind("bfloat16"), 40, 128): 1,
                (ProductKind("bfloat16"), 64, 128): 1,
                (ProductKind("bfloat16"), 24, 64): 1,
            },
        ),
        (model_of(mx.float32), {}),
        # a width of 64 is too narrow for one of them
        (model_of(bits=4), {(ProductKind("bfloat16", 4), 40, 128): 3, (ProductKind("bfloat16", 4), 64, 128): 3}),
        (model_of(bits=3), {}),
    ],
)
def test_the_products_of_a_model_and_their_weights(model: nn.Module, products: dict[Any, int]) -> None:
    found = products_of(model)
    assert {key: len(weights[0]) for key, weights in found.items()} == {Product(*key): n for key, n in products.items()}


def test_layers_that_are_alike_are_one_product() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    layers.set_dtype(mx.float16)
    (weights,) = products_of(layers).values()
    assert {id(one) for (one,) in weights} == {id(layer["weight"]) for layer in layers.layers} and len(weights) == 3


def test_on_cuda_few_rows_of_packed_or_narrow_weights_take_our_kernel() -> None:
    require_tools()
    warned: list[str] = []
    ways = linear_ways(model_of(), path_on("cuda", EmulatorLauncher(passes=(FORWARD,))), warned.append)
    assert ways is not None and ways.skinny is not None and not warned
    assert ways.join and ways.dense_above
    faster = ways.skinny.faster
    assert faster(32, 2048, 8192, 0, 0) and faster(16, 28672, 4096, 0, 0) and faster(32, 28672, 4096, 4, 64)
    assert not faster(32, 28672, 4096, 0, 0) and not faster(32, 4096, 4096, 0, 0)


def test_a_kernel_that_fails_is_not_used_and_that_is_said() -> None:
    def launch(*_: object, **__: object) -> list[object]:
        raise RuntimeError("no such instruction")

    warned: list[str] = []
    ways = linear_ways(model_of(), path_on("cuda", launch), warned.append)
    assert ways is not None and ways.skinny is None and ways.join
    (line,) = warned
    assert line.startswith("products of few rows are left to MLX on a device: skinny_matmul failed on 2 rows")


def test_on_a_cpu_products_stay_mlxs() -> None:
    assert linear_ways(model_of(), path_on("cpu", None), pytest.fail) is None


def test_on_metal_what_was_timed_decides_and_is_remembered(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    require_tools()
    timed: list[int] = []

    def times(launch: object, weights: dict[Product, Any]) -> ProductChoice:
        timed.append(len(weights))
        return ProductChoice((ProductTime(8, 64, 128, 0, 0, 1.0, 2.0),))

    monkeypatch.setattr(linear_ways_module, "time_products", times)
    path = path_on("metal", EmulatorLauncher(passes=(FORWARD,)))
    for _ in range(2):
        ways = linear_ways(model_of(), path, pytest.fail)
        assert ways is not None and not ways.join and ways.dense_above is None and ways.skinny is not None
        assert ways.skinny.faster(8, 64, 128, 0, 0) and not ways.skinny.faster(8, 40, 128, 0, 0)
    assert timed == [3]


def test_on_metal_a_kernel_that_fails_or_never_wins_is_not_used(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    require_tools()

    def refused(*_: object, **__: object) -> list[object]:
        raise RuntimeError("no matrix unit")

    def no_room(*_: object) -> ProductChoice:
        raise RuntimeError("no room")

    warned: list[str] = []
    assert linear_ways(model_of(), path_on("metal", refused), warned.append) is None
    path = path_on("metal", EmulatorLauncher(passes=(FORWARD,)))
    monkeypatch.setattr(linear_ways_module, "time_products", no_room)
    assert linear_ways(model_of(), path, warned.append) is None
    assert [line.split(": ", 1)[1] for line in warned] == [
        "skinny_matmul failed on 2 rows of bfloat16 dense, 1 tiles: RuntimeError: no matrix unit",
        "they could not be timed: no room",
    ]
    monkeypatch.setattr(linear_ways_module, "time_products", lambda *_: ProductChoice())
    assert linear_ways(model_of(), path, pytest.fail) is None
