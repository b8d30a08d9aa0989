"""What is found out about a model's ropes, and how strictly their stand-ins stand in."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import rope_utils

from mlxpaged.kernels.launch import new_token
from mlxpaged.kernels.rope_write import rope_write, rotate_reference
from mlxpaged.model import rotation
from mlxpaged.model.attention import AttentionStep
from mlxpaged.model.compiled import BucketRows
from mlxpaged.model.fusedstep import FusedStep
from mlxpaged.model.kernelpool import KernelPool
from mlxpaged.model.kvspec import KVSpec, LayerSpec
from mlxpaged.model.rotation import StepOffset, Unrotated, install_rotations, remove_rotations

from ..emulator import FORWARD, EmulatorLauncher, require_tools
from .families import tiny_model

ROPES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.RoPE(32),
    "in part, traditional": lambda: nn.RoPE(16, traditional=True, base=5e5),
    "slowed": lambda: nn.RoPE(32, scale=0.25),
    "llama3": lambda: rope_utils.Llama3RoPE(32, scaling_config={"factor": 8.0}),
    "yarn, scaled": lambda: rope_utils.YarnRoPE(32, scaling_factor=8.0),
    "yarn, scaled in part": lambda: rope_utils.YarnRoPE(16, scaling_factor=8.0, traditional=True),
    "long": lambda: rope_utils.SuScaledRoPE(32, long_factor=[1.0 + i for i in range(16)]),
    "proportional": lambda: rope_utils.ProportionalRoPE(32, 8),
}
POSITIONS = mx.array([3, 0, 700, 12345], mx.int32)


class Model(nn.Module):
    """A model of nothing but ropes."""

    def __init__(self, *ropes: nn.Module) -> None:
        super().__init__()
        self.ropes = list(ropes)


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(1).standard_normal(shape, np.float32))


@pytest.mark.parametrize("name", ROPES)
def test_what_the_kernel_is_told_to_do_is_what_the_rope_does(name: str) -> None:
    x = normal(4, 3, 1, 32)
    rope, stock = ROPES[name](), ROPES[name]()
    assert install_rotations(Model(rope)) == 1
    left = rope(x, offset=StepOffset(POSITIONS))
    assert type(left) is Unrotated and left.array is x
    assert (left.shape, left.ndim, left.dtype) == (x.shape, 4, x.dtype)
    expected = np.array(stock(x, offset=POSITIONS))
    assert np.array_equal(np.array(left.rotated()), expected)
    way, table = left.rotation, np.array(left.table())
    got = rotate_reference(np.array(x)[:, :, 0], table, way.dims, way.traditional, way.scale)
    np.testing.assert_allclose(got, expected[:, :, 0], atol=2e-5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("name", ROPES)
def test_the_kernel_rounds_where_the_rope_does(name: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a prompt are rotated by the rope: those of a reply must not be scaled by a little more or less."""
    require_tools()
    stock = mx.fast.rope  # in 16 bits throughout on a CPU; on a GPU it rounds once
    monkeypatch.setattr(
        mx.fast, "rope", lambda x, *how, **more: stock(x.astype(mx.float32), *how, **more).astype(dtype)
    )
    rope, x = ROPES[name](), normal(4, 3, 1, 32).astype(dtype)
    expected = rope(x, offset=POSITIONS)
    monkeypatch.undo()
    assert install_rotations(Model(rope)) == 1
    left, pools = rope(x, offset=StepOffset(POSITIONS)), mx.zeros((2, 4, 16, 3, 32), dtype)
    rotated, _ = rope_write(
        EmulatorLauncher(passes=(FORWARD,)),
        *pools,
        x,
        x,
        x,
        left.table(),
        mx.zeros((8,), mx.int32),
        new_token(),
        dims=left.rotation.dims,
        traditional=left.rotation.traditional,
        scale=left.rotation.scale,
    )
    differ = mx.mean((rotated[:, 0] != expected[:, :, 0]).astype(mx.float32)).item()
    assert differ < 0.01, f"{differ:.1%} of the elements are not the rope's own"


def test_a_table_is_made_once_a_step_and_shared_by_ropes_that_are_alike() -> None:
    ropes = [nn.RoPE(16), nn.RoPE(16), nn.RoPE(16, base=1e6), nn.RoPE(16, traditional=True)]
    assert install_rotations(Model(*ropes)) == 4
    first, second = StepOffset(POSITIONS), StepOffset(POSITIONS)
    x = normal(4, 2, 1, 16)
    tables = [rope(x, offset=first).table() for rope in ropes]
    assert tables[0] is tables[1] and len({id(table) for table in tables}) == 3
    assert ropes[0](x, offset=second).table() is not tables[0]
    assert ropes[0](normal(4, 2, 1, 24), offset=first).table().shape == (4, 24)


def test_ropes_stay_stock_for_everything_else_and_can_be_given_back() -> None:
    model, _ = tiny_model("gpt_oss")
    x, kinds = normal(4, 2, 1, 16), [type(part) for part in model.modules()]
    rope = model.layers[0].self_attn.rope
    before = [np.array(rope(x, offset=offset)) for offset in (0, 7, POSITIONS)] + [np.array(rope(x))]
    assert install_rotations(model) == install_rotations(model) == 4
    after = [np.array(rope(x, offset=offset)) for offset in (0, 7, POSITIONS)] + [np.array(rope(x))]
    assert all(map(np.array_equal, before, after))
    chunk = normal(1, 2, 4, 16)
    assert isinstance(rope(chunk, offset=StepOffset(mx.array([5]))), mx.array)
    remove_rotations(model)
    assert [type(part) for part in model.modules()] == kinds and not hasattr(rope, "_rotation")


def test_a_rope_that_does_something_else_is_not_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = nn.RoPE.__call__
    monkeypatch.setattr(nn.RoPE, "__call__", lambda self, x, offset=0: stock(self, x, offset=offset) + 0.01)
    rope, other = nn.RoPE(32), rope_utils.Llama3RoPE(32, scaling_config={"factor": 8.0})
    dynamic = rope_utils.DynamicNTKScalingRoPE(32, 64, False, 1e4, 2.0)
    assert install_rotations(Model(rope, other, dynamic)) == 1
    x = normal(4, 2, 1, 32)
    rotated = rope(x, offset=StepOffset(POSITIONS))
    assert np.array_equal(np.array(rotated), np.array(stock(nn.RoPE(32), x, offset=POSITIONS) + 0.01))


def test_a_rotation_misunderstood_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one whose only fault is the order of pairs."""
    swapped = rotation.pairs
    monkeypatch.setattr(rotation, "pairs", lambda dims, traditional: swapped(dims, not traditional))
    assert install_rotations(Model(nn.RoPE(32))) == 0


@pytest.mark.parametrize(
    "touch",
    [
        lambda q: q * 2,
        lambda q: 2 * q,
        lambda q: q + mx.zeros((4, 2, 1, 32)),
        lambda q: mx.zeros((4, 2, 1, 32)) + q,
        lambda q: mx.fast.rms_norm(q, None, 1e-5),
        lambda q: mx.concatenate([q, q]),
        lambda q: q.astype(mx.float32),
        operator.neg,
        operator.itemgetter(0),
    ],
)
def test_nothing_can_be_computed_with_a_stand_in(touch: Callable[[Any], Any]) -> None:
    rope = nn.RoPE(32)
    install_rotations(Model(rope))
    offset = StepOffset(POSITIONS)
    for stand_in in (rope(normal(4, 2, 1, 32), offset=offset), offset):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            touch(stand_in)


ROWS, WIDTH = 3, 16
SPEC = KVSpec((LayerSpec(2, WIDTH, WIDTH, mx.float32, None, 4),), 9)


def step_over(kind: type[AttentionStep], launch: Any) -> AttentionStep:
    """Three rows with 4 tokens each in a block of their own, about to decode at position 4."""
    pool = KernelPool(SPEC, (5,), launch)
    own = np.arange(1, 4, dtype=np.int32)
    for place in range(4):
        keys, values = normal(2, ROWS, 2, WIDTH) * (place + 1)
        pool.write(0, mx.array(np.pad(own * 16 + place, (0, 5))), keys, values)
    rows = BucketRows(mx.array(np.repeat(own[:, None], 8, axis=1)), mx.array([5] * 8, mx.int32), 5)
    return kind(pool, ROWS, [rows], [()], mx.array([4] * 3, mx.int32), [mx.array(np.pad(own * 16 + 4, (0, 5)))])


CALLS: dict[str, tuple[str, list[str], list[str]]] = {
    "both unrotated": ("one", ["one"], ["rope_write", "paged_decode"]),
    "then queries of another layer": (
        "one",
        ["one", "one", "stock"],
        ["rope_write", "paged_decode", "paged_decode", "paged_decode"],
    ),
    "queries rotated otherwise": ("one", ["other"], ["kv_write", "paged_decode"]),
    "keys only": ("one", ["stock"], ["kv_write", "paged_decode"]),
    "queries only": ("stock", ["one"], ["kv_write", "paged_decode"]),
    "none": ("stock", ["stock"], ["kv_write", "paged_decode"]),
}
"""Rope of the keys, ropes of the queries that attend to them ("stock": rotated before), and the kernels started."""


@pytest.mark.parametrize("what", CALLS)
def test_a_layer_does_what_the_stock_one_does_however_it_is_called(what: str) -> None:
    require_tools()
    of_keys, of_queries, kernels = CALLS[what]
    ropes = {"one": nn.RoPE(WIDTH), "other": nn.RoPE(WIDTH, base=100.0), "stock": nn.RoPE(WIDTH)}
    install_rotations(Model(ropes["one"], ropes["other"]))
    started: list[str] = []

    def launch(spec: Any, *args: Any, **kwargs: Any) -> list[mx.array]:
        started.append(spec.name)
        return EmulatorLauncher(passes=(FORWARD,))(spec, *args, **kwargs)

    def attended(step: AttentionStep) -> np.ndarray:
        layer = step.layers()[0]
        offsets = {name: step.offset if name == "stock" else layer.offset for name in ropes}
        keys, values = normal(2, ROWS, 2, 1, WIDTH)
        started.clear()
        handles = layer.update_and_fetch(ropes[of_keys](keys, offset=offsets[of_keys]), values)
        assert handles[0].shape == (ROWS, 2, 1, WIDTH) and handles[0].layer is layer
        outs = [
            layer.attend(ropes[name](normal(ROWS, 4, 1, WIDTH) + index, offset=offsets[name]), 0.25, None, None)
            for index, name in enumerate(of_queries)
        ]
        return np.array(mx.stack(outs))

    expected = attended(step_over(AttentionStep, launch))
    got = attended(step_over(FusedStep, launch))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert started == kernels
