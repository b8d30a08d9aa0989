"""The order of calls on the pools is stated by tokens; a call site that forgets one is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.kernels.block_copy import block_copy
from mlxpaged.kernels.kv_gather import kv_gather
from mlxpaged.kernels.kv_write import kv_write
from mlxpaged.kernels.launch import KernelSpec, Launcher, new_token, padded
from mlxpaged.kernels.paged_decode import paged_decode
from mlxpaged.kernels.rope_write import rope_write
from tests.kernels.recording import BrokenChain, RecordingLauncher

LAYERS, STEPS = 2, 3
Chain = Callable[[mx.array], mx.array]


def shapes_only(
    spec: KernelSpec,
    inputs: Sequence[mx.array],
    *,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
    **options: Any,
) -> list[mx.array]:
    """A launcher that computes nothing: the chain is a matter of arguments."""
    return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def rope(
    launch: Launcher, keys: mx.array, values: mx.array, turns: mx.array, slots: mx.array, token: mx.array
) -> mx.array:
    new = mx.zeros((1, 2, 1, 64))
    return rope_write(launch, keys, values, new, new, new, turns, slots, token, dims=64, traditional=False)[1]


def run_steps(launch: RecordingLauncher, between: Chain = lambda token: token, partitions: int = 1) -> mx.array:
    """Copy, write, rotate, decode, gather for LAYERS x STEPS; `between` sees the token wherever it changes hands."""
    pools = [(mx.zeros((4, 16, 2, 64)), mx.zeros((4, 16, 2, 64))) for _ in range(LAYERS)]
    new, queries = mx.zeros((1, 2, 64)), mx.zeros((1, 1, 4, 64))
    slots, tables, copies = padded(np.array([16])), padded(np.array([[1, 2, 3]])), padded(np.array([[1, 2, 4]]))
    turns = mx.ones((1, 64))
    lengths, token = padded(np.array([40])), new_token()
    for _ in range(STEPS):
        for pool in pools:
            token = between(block_copy(launch, *pool, copies, token))
            token = between(kv_write(launch, *pool, new, new, slots, token))
            token = between(rope(launch, *pool, turns, slots, token))
            options = {"max_context": 40, "scale": 1.0, "partitions": partitions}
            token = between(paged_decode(launch, queries, *pool, tables, lengths, token, **options)[1])
            token = between(kv_gather(launch, *pool, slots, 1, token)[2])
    return token


def test_a_whole_chain_passes() -> None:
    launch = RecordingLauncher(shapes_only)
    run_steps(launch)
    assert launch.calls == ["block_copy", "kv_write", "rope_write", "paged_decode", "kv_gather"] * LAYERS * STEPS


def test_the_reduce_touches_no_pool_and_needs_no_token() -> None:
    launch = RecordingLauncher(shapes_only)
    run_steps(launch, partitions=3)
    assert launch.calls.count("paged_decode_reduce") == LAYERS * STEPS


@pytest.mark.parametrize("forgotten", range(5 * LAYERS * STEPS - 1))
def test_a_forgotten_token_is_caught_wherever_it_happens(forgotten: int) -> None:
    handed_over = iter(range(100))
    with pytest.raises(BrokenChain, match="does not take the token"):
        run_steps(
            RecordingLauncher(shapes_only), lambda token: new_token() if next(handed_over) == forgotten else token
        )


def test_an_old_token_is_caught() -> None:
    first: list[mx.array] = []

    def keep_the_first(token: mx.array) -> mx.array:
        first.append(token)
        return first[0]

    with pytest.raises(BrokenChain):
        run_steps(RecordingLauncher(shapes_only), keep_the_first)


@pytest.mark.parametrize("dropped", ["token", "token_out"])
def test_a_kernel_that_drops_the_token_argument_is_caught(dropped: str) -> None:
    recording = RecordingLauncher(shapes_only)

    def without(spec: KernelSpec, inputs: Sequence[mx.array], **options: Any) -> list[mx.array]:
        names = tuple(name for name in spec.input_names if name != dropped)
        outputs = tuple(name for name in spec.output_names if name != dropped)
        return recording(replace(spec, input_names=names, output_names=outputs), inputs, **options)

    with pytest.raises(BrokenChain, match="takes or gives no token"):
        pool, new = mx.zeros((4, 16, 2, 64)), mx.zeros((8, 2, 64))
        kv_write(without, pool, pool, new, new, padded(np.arange(8)), new_token())


def test_every_kernel_on_a_pool_reads_its_token_and_gives_another(launch: RecordingLauncher) -> None:
    """Executed, not only named: each kernel's token is its input's plus one."""
    token = run_steps(RecordingLauncher(launch))
    assert np.array(token).tolist() == [5 * LAYERS * STEPS] * 8
