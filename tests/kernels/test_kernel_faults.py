"""Negative controls: faults put into the kernels' text or arguments are noticed by the same cases that pass without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.kernels.launch import KernelSpec, Launcher
from tests.emulator import EmulatorLauncher, KernelError
from tests.kernels.cases import Case, CopyCase, DecodeCase, GatherCase, RopeCase, WriteCase

PLAIN = DecodeCase(lengths=(17, 0, 64, 150))
WINDOW = DecodeCase("float16", (128, 128), lengths=(17, 200, 150), window=33)
SPLIT = DecodeCase("bfloat16", (64, 64), lengths=(17, 300), partitions=4, sinks=True)
DRAFTS = DecodeCase(lengths=(17, 150), positions=3, window=33)
ROPE = RopeCase(dims=32, scale=1.25)


class FaultyLauncher:
    """The emulator with one piece of one kernel's text replaced, once or at every place."""

    def __init__(self, kernel: str, text: str, fault: str, count: int = -1) -> None:
        self._launch = EmulatorLauncher()
        self._kernel, self._text, self._fault, self._count = kernel, text, fault, count

    def __call__(self, spec: KernelSpec, inputs: Sequence[mx.array], **options: Any) -> list[mx.array]:
        if spec.name == self._kernel:
            assert self._text in spec.source
            spec = replace(spec, source=spec.source.replace(self._text, self._fault, self._count))
        return self._launch(spec, inputs, **options)


def is_noticed(case: Case, launch: Launcher) -> bool:
    try:
        return case.run(launch) > case.tolerance
    except KernelError:
        return True


@pytest.fixture(autouse=True)
def the_cases_pass_without_a_fault(launch: Launcher) -> None:
    for case in (PLAIN, WINDOW, SPLIT, DRAFTS, ROPE):
        assert case.run(launch) <= case.tolerance


def test_a_write_to_the_next_slot_is_noticed() -> None:
    assert is_noticed(WriteCase(), FaultyLauncher("kv_write", "slots[entry]", "slots[entry] + 1"))


def test_a_write_into_the_null_block_is_noticed() -> None:
    assert is_noticed(WriteCase(), FaultyLauncher("kv_write", "slot >= int(key_pool_shape[1])", "slot >= 0"))


def test_a_gather_from_the_next_slot_is_noticed() -> None:
    assert is_noticed(GatherCase(), FaultyLauncher("kv_gather", "slots[entry]", "slots[entry] + 1"))


def test_a_copy_of_one_slot_too_many_is_noticed() -> None:
    assert is_noticed(CopyCase(), FaultyLauncher("block_copy", "offset < slots", "offset <= slots"))


def test_a_copy_into_the_null_block_is_noticed() -> None:
    assert is_noticed(CopyCase(), FaultyLauncher("block_copy", "destination != 0 && ", ""))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slots[entry]", "slots[entry] + 1"),
        ("slot >= int(key_pool_shape[1])", "slot >= 0"),
        ("a * cosine - b * sine", "a * cosine + b * sine"),
        ("T(y * factor)", "T(y)"),
        ("rotations[turn + d]", "1.0f"),
        ("size_t(entry) * DK", "0"),
        ("is_query || (is_key && stored)", "(is_query && stored) || (is_key && stored)"),
        ("entry * queries_strides[0] +", "entry * num_queries * DK +"),
        ("entry * keys_strides[0] +", "entry * num_keys * DK +"),
        ("entry * values_strides[0] +", "entry * num_keys * DV +"),
        ("head * values_strides[1]", "head * values_strides[2]"),
    ],
)
def test_a_false_rotation_write_or_stride_is_noticed(text: str, fault: str) -> None:
    assert is_noticed(ROPE, FaultyLauncher("rope_write", text, fault))


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_context_length_off_by_one_is_noticed(offset: int) -> None:
    assert is_noticed(PLAIN, FaultyLauncher("paged_decode", "context_lens[row]", f"(context_lens[row] + {offset})"))


def test_a_read_from_the_next_slot_is_noticed() -> None:
    assert is_noticed(PLAIN, FaultyLauncher("paged_decode", "at % BLOCK_SIZE", "(at + 1) % BLOCK_SIZE"))


def test_a_skipped_window_start_is_noticed() -> None:
    fault = FaultyLauncher("paged_decode", "max(context_len - Q + 1 - WINDOW, 0)", "0")
    assert is_noticed(WINDOW, fault)


def test_a_window_one_too_wide_is_noticed_by_drafts() -> None:
    assert is_noticed(DRAFTS, FaultyLauncher("paged_decode", "at > position[h] - WINDOW", "at >= position[h] - WINDOW"))


def test_a_draft_that_sees_the_next_position_is_noticed() -> None:
    assert is_noticed(DRAFTS, FaultyLauncher("paged_decode", "at <= position[h]", "at <= position[h] + 1"))


def test_a_partition_that_loses_its_last_token_is_noticed() -> None:
    assert is_noticed(
        SPLIT, FaultyLauncher("paged_decode", "begin + rounds * ROUND_TOKENS,", "begin + rounds * ROUND_TOKENS - 1,")
    )


def test_a_sink_counted_in_every_partition_is_noticed() -> None:
    exact = replace(SPLIT, dtype="float32")  # the sink weighs little beside 64 tokens
    assert exact.run(EmulatorLauncher()) <= exact.tolerance
    assert is_noticed(exact, FaultyLauncher("paged_decode", "SINKS && partition == 0", "SINKS"))


def test_a_partition_without_tokens_that_starts_a_token_late_is_noticed() -> None:
    just_split = replace(SPLIT, dtype="float32", lengths=(17, 129))
    assert just_split.run(EmulatorLauncher()) <= just_split.tolerance
    assert is_noticed(just_split, FaultyLauncher("paged_decode", "begin >= context_len)", "begin + 1 >= context_len)"))


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def test_a_removed_barrier_before_the_merge_is_noticed() -> None:
    assert is_noticed(PLAIN, FaultyLauncher("paged_decode", BARRIER, "", count=1))


def test_a_removed_barrier_between_rounds_of_the_merge_is_noticed() -> None:
    wide = DecodeCase(widths=(256, 256), group=4, lengths=(17, 150))  # two heads fit a round of the merge
    fault = FaultyLauncher("paged_decode", f"  }}\n  {BARRIER}\n}}", "  }\n}")
    assert wide.run(EmulatorLauncher()) <= wide.tolerance
    assert is_noticed(wide, fault)


def test_a_removed_barrier_in_the_reduce_is_noticed() -> None:
    assert is_noticed(SPLIT, FaultyLauncher("paged_decode_reduce", BARRIER, ""))
