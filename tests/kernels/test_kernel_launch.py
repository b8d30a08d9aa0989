"""Specs, shape checks and what the launchers hand to MLX."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.errors import LayoutError
from mlxpaged.kernels import block_copy, kv_gather, kv_write, paged_decode, records, rope_write, skinny_matmul
from mlxpaged.kernels.launch import (
    CudaLauncher,
    KernelSpec,
    MetalLauncher,
    floats,
    metal_text,
    new_token,
    padded,
    require_row_contiguous,
)
from mlxpaged.kernels.paged_decode import paged_decode_reference
from tests.kernels.test_kernel_tokens import shapes_only

SPECS = [*records.SPECS, skinny_matmul.SPEC]
POOL = (4, 16, 2, 64)


def by_name(spec: KernelSpec) -> str:
    return spec.name


@pytest.mark.parametrize("spec", SPECS, ids=by_name)
def test_a_kernel_names_every_argument_in_its_header_comment_and_uses_it(spec: KernelSpec) -> None:
    comment = files("mlxpaged.metal").joinpath(f"{spec.name}.metal").read_text().split("\n\n")[0]
    for name in spec.input_names + spec.output_names:
        assert re.search(rf"^//   {name} +\[", comment, re.MULTILINE), name
        assert re.search(rf"\b{name}\b", spec.source), name


@pytest.mark.parametrize("spec", SPECS, ids=by_name)
def test_a_kernel_keeps_to_the_portable_dialect(spec: KernelSpec) -> None:
    text = spec.header + spec.source
    assert "//" not in text, "comments are hashed at every call"
    assert "INFINITY" not in text and "double" not in text
    assert all(re.match(r"(float|u?int) \w+\[", use) for use in re.findall(r"\bthreadgroup (.*)", spec.source))
    assert set(spec.inplace) <= {"key_pool", "value_pool"}


def test_only_the_writers_write_their_pools() -> None:
    assert [spec.name for spec in SPECS if spec.inplace] == ["kv_write", "rope_write", "block_copy"]


def test_metal_text_loses_its_comments_but_not_its_code() -> None:
    assert "Writes a step's new K and V" not in metal_text("kv_write.metal")
    assert "const int slot = slots[entry];\n" in metal_text("kv_write.metal")


def test_padded_metadata_has_eight_elements_and_ends_in_zeros() -> None:
    assert np.array(padded(np.array([5, 6]))).tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert padded(np.array([[1, 2, 3]])).shape == (3, 3)
    assert padded(np.zeros((9, 1), np.int64)).shape == (9, 1)
    assert padded(np.array([5.0])).dtype == mx.int32


def test_model_constants_are_made_once() -> None:
    assert floats(0.5, 2.0) is floats(0.5, 2.0)
    assert np.array(floats(0.5, 2.0)).tolist() == [0.5, 2.0, 0, 0, 0, 0, 0, 0]


class FakeKernel:
    """Stands in for mx.fast.metal_kernel and mx.fast.cuda_kernel: keeps what it was given."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> Any:
        self.made.append(arguments)
        return self._call

    def _call(self, **call: Any) -> list[mx.array]:
        self.calls.append(call)
        return [
            mx.zeros(shape, dtype) for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]


def write_once(launch: Any, pool: mx.array, slots: mx.array | None = None) -> mx.array:
    new = mx.zeros((1, *pool.shape[2:]))
    return kv_write.kv_write(launch, pool, pool, new, new, padded(np.ones(1)) if slots is None else slots, new_token())


@pytest.mark.parametrize(("launcher", "maker"), [(MetalLauncher, "metal_kernel"), (CudaLauncher, "cuda_kernel")])
def test_a_launcher_makes_one_kernel_per_spec(monkeypatch: pytest.MonkeyPatch, launcher: Any, maker: str) -> None:
    fake, launch = FakeKernel(), launcher()
    monkeypatch.setattr(mx.fast, maker, fake)
    for _ in range(3):
        write_once(launch, mx.zeros(POOL))
    assert len(fake.made) == 1 and len(fake.calls) == 3
    assert fake.made[0][0] == "kv_write" and fake.made[0][5] is True
    assert fake.calls[0]["grid"] == (256, 1, 1) and fake.calls[0]["template"] == [("T", mx.float32)]


@pytest.mark.parametrize(("launcher", "maker"), [(MetalLauncher, "metal_kernel"), (CudaLauncher, "cuda_kernel")])
def test_mlx_is_told_to_copy_no_input_of_a_kernel_that_takes_strides(
    monkeypatch: pytest.MonkeyPatch, launcher: Any, maker: str
) -> None:
    fake = FakeKernel()
    monkeypatch.setattr(mx.fast, maker, fake)
    assert rope_once(launcher())[0].shape == (1, 1, 4, 64)
    assert fake.made[0][0] == "rope_write" and fake.made[0][5] is False


def rope_once(launch: Any, **change: Any) -> tuple[mx.array, mx.array]:
    call: dict[str, Any] = {
        "key_pool": mx.zeros(POOL),
        "value_pool": mx.zeros(POOL),
        "queries": mx.zeros((1, 4, 1, 64)),
        "keys": mx.zeros((1, 2, 1, 64)),
        "values": mx.zeros((1, 2, 1, 64)),
        "rotations": mx.zeros((1, 64)),
        "slots": padded(np.ones(1)),
        "token": new_token(),
        "dims": 64,
        "traditional": False,
    }
    return rope_write.rope_write(launch, **(call | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": mx.zeros((1, 4, 1, 32))}, "queries is .* fits pools"),
        ({"queries": mx.zeros((1, 4, 1, 64), mx.float16)}, "queries is .*float16, the pools are .*float32"),
        ({"keys": mx.zeros((1, 2, 64))}, "keys is .* fits pools"),
        ({"values": mx.zeros((2, 2, 1, 64))}, "values is .* fits pools"),
        ({"rotations": mx.zeros((1, 32))}, r"rotations is .* must be float32 \[>= 1, 64\]"),
        ({"rotations": mx.zeros((1, 64), mx.float16)}, "must be float32"),
        ({"dims": 33}, "33 of 64 elements cannot be rotated in pairs"),
        ({"dims": 66}, "66 of 64"),
        ({"slots": mx.zeros((1,), mx.int32)}, "8 elements"),
    ],
)
def test_rope_write_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        rope_once(shapes_only, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": mx.zeros((33, 128), mx.float16)}, "no kernel for rows"),
        ({"rows": mx.zeros((0, 128), mx.float16)}, "no kernel for rows"),
        ({"rows": mx.zeros((2, 128))}, "no kernel for rows .*float32"),
        ({"rows": mx.zeros((2, 120), mx.float16)}, "no kernel for rows"),
        ({"weight": mx.zeros((8, 128), mx.bfloat16)}, "a weight of .*bfloat16 is not one of no packed bits"),
        ({"weight": mx.zeros((8, 256), mx.float16)}, "is not one of no packed bits"),
        ({"bits": 4}, "is not one of 4 packed bits"),
        ({"bits": 3}, "no kernel for rows .* 3 bits"),
        ({"bits": 4, "group_size": 48}, "no kernel for rows .* groups of 48"),
        ({"scales": mx.zeros((8, 2), mx.float16), "biases": mx.zeros((8, 2), mx.float16)}, "no packed bits"),
    ],
)
def test_skinny_matmul_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"rows": mx.zeros((2, 128), mx.float16), "weight": mx.zeros((8, 128), mx.float16)}
    assert skinny_matmul.skinny_matmul(shapes_only, **call).shape == (2, 8)
    with pytest.raises(LayoutError, match=message):
        skinny_matmul.skinny_matmul(shapes_only, **(call | change))


def test_packed_weights_fit_by_their_groups_and_width() -> None:
    fits = skinny_matmul.fits
    assert fits(mx.bfloat16, 128, 4, 64) and fits(mx.bfloat16, 64, 8, 32) and fits(mx.float16, 32)
    assert not fits(mx.bfloat16, 192, 4, 64), "a span of 4-bit weights is 128 wide"
    assert not fits(mx.bfloat16, 128, 4, 16) and not fits(mx.bfloat16, 128, 6, 64)
    assert [skinny_matmul.row_tiles(rows) for rows in (1, 8, 9, 16, 17, 32)] == [1, 1, 2, 2, 4, 4]


def test_the_metal_launcher_refuses_a_pool_that_mlx_would_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", FakeKernel())
    with pytest.raises(LayoutError, match=r"key_pool of shape \(4, 16, 2, 64\) is not row-contiguous"):
        write_once(MetalLauncher(), mx.zeros((4, 2, 16, 64)).transpose(0, 2, 1, 3))


def test_a_slice_along_blocks_is_still_row_contiguous_but_one_along_slots_is_not() -> None:
    require_row_contiguous("key_pool", mx.zeros(POOL)[1:])
    with pytest.raises(LayoutError):
        require_row_contiguous("key_pool", mx.zeros(POOL)[:, 1:])


@pytest.mark.parametrize(
    ("pool", "slots", "message"),
    [
        (mx.zeros((4, 16, 2)), None, "must be"),
        (mx.zeros((4, 16, 2, 60)), None, "multiples of 8"),
        (mx.zeros((4, 16, 2, 264)), None, "up to 256"),
        (mx.zeros(POOL), mx.zeros((8,), mx.int64), "slots is .* must be int32"),
        (mx.zeros(POOL), mx.zeros((1,), mx.int32), "8 elements"),
    ],
)
def test_kv_write_refuses_what_does_not_fit(pool: mx.array, slots: mx.array | None, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        write_once(shapes_only, pool, slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": mx.zeros((1, 1, 3, 64))}, "queries .* do not fit"),
        ({"queries": mx.zeros((1, 1, 4, 64), mx.float16)}, "float16 do not fit"),
        ({"max_context": 129}, "max_context is 129; .* holds 128"),
        ({"sinks": mx.zeros((2,))}, "there are 4 query heads"),
        ({"queries": mx.zeros((9, 1, 4, 64))}, "tables is .* at least 9 entries"),
    ],
)
def test_paged_decode_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "queries": mx.zeros((1, 1, 4, 64)),
        "key_pool": mx.zeros(POOL),
        "value_pool": mx.zeros(POOL),
        "tables": mx.zeros((1, 8), mx.int32),
        "context_lens": padded(np.ones(1)),
        "token": new_token(),
        "max_context": 128,
        "scale": 1.0,
    }
    paged_decode.paged_decode(shapes_only, **call)
    with pytest.raises(LayoutError, match=message):
        paged_decode.paged_decode(shapes_only, **(call | change))


def test_kernels_refuse_to_start_for_nothing() -> None:
    new = mx.zeros((0, 2, 64))
    with pytest.raises(LayoutError, match="at least one"):
        kv_write.kv_write(shapes_only, mx.zeros(POOL), mx.zeros(POOL), new, new, padded(np.ones(1)), new_token())


def test_kernels_refuse_a_pool_they_cannot_count() -> None:
    pool = mx.zeros((1 << 22, 16, 8, 64))  # 128 GiB, never evaluated
    with pytest.raises(LayoutError, match="kernels take 68719476736"):
        kv_gather.kv_gather(shapes_only, pool, pool, padded(np.ones(1)), 1, new_token())


def test_block_copy_refuses_pairs_without_slots() -> None:
    with pytest.raises(LayoutError, match="source, destination, slots"):
        block_copy.block_copy(shapes_only, mx.zeros(POOL), mx.zeros(POOL), mx.zeros((4, 2), mx.int32), new_token())


@pytest.mark.parametrize("traditional", [False, True])
def test_the_rotation_reference_equals_mlx_rope(traditional: bool) -> None:
    vectors, positions = np.random.default_rng(1).standard_normal((3, 2, 64)).astype(np.float32), np.array([0, 5, 70])
    expected = mx.fast.rope(
        mx.array(vectors)[:, :, None], 32, traditional=traditional, base=1e4, scale=1.0, offset=mx.array(positions)
    )
    angles = positions[:, None] * 1e4 ** (-np.arange(16) / 16)
    turns, (first, second) = np.ones((3, 64)), rope_write.pairs(32, traditional)
    turns[:, first], turns[:, second] = np.cos(angles), np.sin(angles)
    got = rope_write.rotate_reference(vectors, turns, 32, traditional)
    np.testing.assert_allclose(got, np.array(expected)[:, :, 0], atol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_decode_reference_equals_mlx_attention(sinks: bool) -> None:
    """The reference itself, against mx.fast.scaled_dot_product_attention on contiguous K and V."""
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 3, 16, 2, 64)).astype(np.float32)
    queries = rng.standard_normal((1, 4, 6, 64)).astype(np.float32)
    sink = rng.standard_normal(6).astype(np.float32) if sinks else None
    tables, lengths = np.array([[2, 0, 1]]), np.array([40])
    run = [mx.array(pool[tables[0]].reshape(1, -1, 2, 64)[:, :40].transpose(0, 2, 1, 3)) for pool in (keys, values)]
    expected = mx.fast.scaled_dot_product_attention(
        mx.array(queries.transpose(0, 2, 1, 3)),
        *run,
        scale=0.125,
        mask="causal",
        sinks=None if sink is None else mx.array(sink),
    )
    got = paged_decode_reference(queries, keys, values, tables, lengths, scale=0.125, sinks=sink)
    np.testing.assert_allclose(got, np.array(expected).transpose(0, 2, 1, 3), atol=1e-5)
