"""The memory plan's arithmetic, on the figures that everybody knows and on machines at both ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxpaged.cli.options import byte_count
from mlxpaged.model.kvplan import KV_FORMATS, KVGroup, affordable, most, plan_blocks, row_bytes, start_blocks
from mlxpaged.model.memplan import (
    Machine,
    MemoryPlan,
    Need,
    Wish,
    Work,
    gib,
    is_fused,
    plan_memory,
    refusal,
    shortfall,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
FP16 = KV_FORMATS["float16"]

MAC_16 = Machine(total=16 * GIB, free=13 * GIB, working_set=int(10.67 * GIB))
MAC_128 = Machine(total=128 * GIB, free=110 * GIB, working_set=96 * GIB)
H200 = Machine(total=139 * GIB, free=138 * GIB)

LLAMA_8B = KVGroup.of(layers=32, heads=8, k_width=128, v_width=128, form=FP16)
LLAMA_70B = KVGroup.of(layers=80, heads=8, k_width=128, v_width=128, form=FP16)
WORK_8B = Work(4096, 14336, 32, 128, 128_256, 2, fused=True)
WORK_SMALL = Work(576, 1536, 9, 64, 49_152, 4, fused=True)


def need(weights: float, *groups: KVGroup, context: int = 131_072, **fields: Any) -> Need:
    return Need("the model", int(weights * GIB), groups or (LLAMA_8B,), WORK_8B, context, **fields)


def total(plan: MemoryPlan, groups: tuple[KVGroup, ...]) -> int:
    blocks = sum(count * group.block_bytes for count, group in zip(plan.most_blocks, groups, strict=True))
    return plan.weights_bytes + plan.chunk_bytes + plan.cache_bytes + plan.fixed_bytes + blocks


def test_llama_3_70b_takes_327680_bytes_a_token_and_32_requests_of_32k_take_320_gib() -> None:
    assert LLAMA_70B.token_bytes == 327_680
    assert 32 * row_bytes([LLAMA_70B], 32_768, 512) == 320 * GIB


@pytest.mark.parametrize(
    ("layers", "heads", "k_width", "v_width", "form", "token_bytes"),
    [
        (32, 8, 128, 128, "float16", 131_072),  # Llama 3 8B
        (32, 32, 128, 128, "float16", 524_288),  # Llama 2 7B, no grouped queries
        (30, 3, 64, 64, "float32", 46_080),  # SmolLM2 135M as the CPU holds it
        (61, 1, 512 + 64, 0, "bfloat16", 70_272),  # DeepSeek V3: the latent and the rotated key
        (80, 8, 128, 128, "int8", 174_080),  # 8 bits, a scale and a bias of 16 bits per 64 numbers
        (80, 8, 128, 128, "int4", 92_160),
        (1, 1, 96, 96, "int4", 2 * (48 + 8)),  # a group that is not full has its scale all the same
    ],
)
def test_bytes_a_token(layers: int, heads: int, k_width: int, v_width: int, form: str, token_bytes: int) -> None:
    assert KVGroup.of(layers, heads, k_width, v_width, KV_FORMATS[form]).token_bytes == token_bytes


def test_windowed_layers_stop_growing_at_window_and_chunk() -> None:
    """gpt-oss-20b: 12 layers keep everything, 12 keep 128 tokens; 8 heads of 64."""
    full = KVGroup.of(12, 8, 64, 64, FP16)
    windowed = KVGroup.of(12, 8, 64, 64, FP16, window=128)
    assert full.token_bytes == windowed.token_bytes == 24_576
    assert row_bytes([windowed], 131_072, 512) == (40 + 2) * 16 * 24_576
    assert row_bytes([full, windowed], 131_072, 512) == 131_072 * 24_576 + 42 * 16 * 24_576
    assert row_bytes([full, windowed], 100, 512) == 2 * 7 * 16 * 24_576


def test_a_16_gb_mac_with_a_9_gb_model_gets_what_the_working_set_leaves() -> None:
    wish = Wish(step_budget=512)
    plan = plan_memory(MAC_16, need(9.0), wish)
    assert plan.limited_by == "the GPU's recommended working set" and plan.fits
    assert plan.kv_bytes == plan.limit_bytes - 9 * GIB - plan.chunk_bytes - plan.cache_bytes
    assert total(plan, (LLAMA_8B,)) <= plan.limit_bytes
    assert 7_000 < plan.largest_context < 14_000
    assert plan.most_blocks[0] * 16 >= plan.largest_context
    assert plan.start_blocks == (257,)  # 4096 tokens and the null block


def test_its_whole_context_is_refused_with_the_numbers_and_the_flag() -> None:
    plan = plan_memory(MAC_16, need(9.0), Wish(context_len=131_072, step_budget=512))
    reason = refusal(plan)
    assert reason is not None and "\n" not in reason
    assert "weights take 9.00 GiB" in reason and "working set allows 10.67 GiB" in reason and "128.0 KiB" in reason
    assert f"the largest that does is {plan.largest_context:,}; use --ctx {plan.largest_context}" in reason
    again = plan_memory(MAC_16, need(9.0), Wish(context_len=plan.largest_context, step_budget=512))
    assert refusal(again) is None
    assert not plan_memory(MAC_16, need(9.0), Wish(context_len=plan.largest_context + 1, step_budget=512)).fits


def test_a_128_gb_mac_with_a_4_gb_model_holds_several_whole_contexts() -> None:
    plan = plan_memory(MAC_128, need(4.0), Wish(step_budget=2048))
    assert plan.fits and plan.largest_context == 131_072
    assert plan.limited_by == "the GPU's recommended working set"
    assert 80 * GIB < plan.most_blocks[0] * LLAMA_8B.block_bytes <= plan.kv_bytes < 92 * GIB
    assert plan.start_blocks[0] * LLAMA_8B.block_bytes < GIB


def test_the_pool_is_never_larger_than_its_rows_could_use() -> None:
    plan = plan_memory(MAC_128, need(4.0, context=8192), Wish(rows=4, pool_rows=4))
    assert plan.most_blocks == (4 * 512 + 1,)


def test_a_machine_where_the_model_cannot_fit_says_so() -> None:
    plan = plan_memory(MAC_16, need(12.0), Wish())
    assert (plan.fits, plan.largest_context, plan.kv_bytes) == (False, 0, 0)
    reason = refusal(plan)
    assert reason is not None and "so no context fits; give a smaller or more quantised model" in reason


def test_little_free_memory_limits_before_the_working_set_does() -> None:
    busy = replace(MAC_16, free=6 * GIB)
    plan = plan_memory(busy, need(4.0), Wish())
    assert plan.limited_by == "the free memory" and plan.limit_bytes == 5 * GIB  # 1 GiB is left to the others
    reason = refusal(plan_memory(busy, need(5.5), Wish()))
    assert reason is not None and "close other programs" in reason


def test_a_memory_budget_bounds_weights_kv_and_work_together() -> None:
    plan = plan_memory(H200, need(4.0), Wish(memory_budget=8 * GIB))
    assert plan.limited_by == "--memory-budget" and plan.kv_bytes < 4 * GIB
    assert total(plan, (LLAMA_8B,)) <= 8 * GIB


def test_a_budget_that_is_too_small_is_told_one_that_is_enough() -> None:
    model = need(4.0)
    for budget in (1, 3 * GIB):
        reason = refusal(plan_memory(H200, model, Wish(memory_budget=budget)))
        assert reason is not None
        named = byte_count("--memory-budget", reason.split("raise --memory-budget to ")[1].split()[0])
        assert refusal(plan_memory(H200, model, Wish(memory_budget=named))) is None


def test_no_budget_is_named_that_the_machine_could_not_give() -> None:
    reason = refusal(plan_memory(MAC_16, need(12.0), Wish(memory_budget=3 * GIB)))
    assert reason is not None and "--memory-budget allows 3.00 GiB, so no context fits; give a smaller" in reason


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "1 byte"), (4096, "4,096 bytes"), (2**20, "1.0 MiB"), (100 * 2**20, "100.0 MiB"), (513 * 2**20, "0.50 GiB")],
)
def test_bytes_are_told_in_one_unit_small_ones_in_mib(count: int, words: str) -> None:
    assert gib(count) == words


def test_a_larger_budget_than_the_machine_changes_nothing() -> None:
    assert plan_memory(MAC_16, need(4.0), Wish(memory_budget=GIB * 500)) == plan_memory(MAC_16, need(4.0), Wish())


def test_half_the_share_is_half_the_kv() -> None:
    whole, half = (plan_memory(MAC_16, need(4.0), Wish(share=share, step_budget=64)) for share in (1.0, 0.5))
    assert half.kv_bytes == pytest.approx(whole.kv_bytes / 2, rel=0.1)


def test_unfused_scores_count() -> None:
    """Heads of 256: 32 heads x 2048 tokens x 32k context x 4 bytes a layer is 8 GiB."""
    assert not is_fused(256, on_gpu=True) and is_fused(128, on_gpu=True) and not is_fused(128, on_gpu=False)
    unfused = replace(WORK_8B, head_width=256, fused=False)
    fused = replace(unfused, fused=True)
    more = unfused.chunk_bytes(2048, 32_768, 1, 4096) - fused.chunk_bytes(2048, 32_768, 1, 4096)
    assert more == 8 * GIB


def test_a_measured_step_takes_the_place_of_the_estimate() -> None:
    told = replace(WORK_8B, token_bytes=1000.0, step_bytes=5 * MIB)
    assert told.chunk_bytes(512, 0, 0, 0) == 5 * MIB + 512_000
    assert WORK_8B.chunk_bytes(512, 0, 0, 0) == 512 * 2 * (6 * 4096 + 3 * 14336 + 2 * 32 * 128)


def test_recurrent_state_counts_once_a_request() -> None:
    state = need(4.0, KVGroup(1024, 1), fixed_bytes=3 * GIB)
    lean, fat = (plan_memory(MAC_16, one, Wish(rows=1, pool_rows=1)) for one in (need(4.0, KVGroup(1024, 1)), state))
    assert lean.fits and fat.fits
    assert not plan_memory(MAC_16, replace(state, fixed_bytes=7 * GIB), Wish(rows=1, pool_rows=1)).fits


def test_the_longest_request_comes_first_when_groups_share_a_small_budget() -> None:
    full, windowed = KVGroup(1024, 12), KVGroup(1024, 12, window=128)
    budget = row_bytes([full, windowed], 4096, 64) + full.block_bytes + windowed.block_bytes
    counts = plan_blocks([full, windowed], budget_bytes=budget, context_len=8192, max_rows=8, step_budget=64)
    assert counts == (257, 12 + 2 + 1)


def test_blocks_never_cost_more_than_the_budget() -> None:
    groups = [KVGroup(1000, 3), KVGroup(700, 2, window=100)]
    for budget in range(200_000, 40_000_000, 1_234_567):
        counts = plan_blocks(groups, budget_bytes=budget, context_len=4096, max_rows=8, step_budget=32)
        assert sum(count * group.block_bytes for count, group in zip(counts, groups, strict=True)) <= budget
        begun = start_blocks(groups, counts, 32)
        assert all(2 <= start <= ceiling for start, ceiling in zip(begun, counts, strict=True))


def test_growth_counts_the_layer_that_is_held_twice() -> None:
    group = KVGroup(token_bytes=64, layers=4)  # 1024 bytes a block, 256 of a layer
    assert affordable([100], [200], [group], 100 * 1024 + 100 * 256) == (200,)
    assert affordable([100], [200], [group], 100 * 1024 + 100 * 256 - 1) == (199,)
    assert affordable([100], [200], [group], 100 * 256) == (100,)
    assert affordable([100], [200], [group], -5) == (100,)
    assert affordable([100], [40], [group], 0) == (40,)


def test_most_finds_the_last_number_that_holds() -> None:
    assert [most(lambda n, limit=limit: n <= limit, 9) for limit in (-1, 0, 1, 5, 9, 20)] == [0, 0, 1, 5, 9, 9]


def test_a_context_that_does_not_fit_is_told_with_what_is_left_however_little_that_is() -> None:
    small = replace(need(0.1, KVGroup.of(30, 3, 64, 64, KV_FORMATS["float32"]), context=8192), work=WORK_SMALL)
    plan = plan_memory(MAC_16, small, Wish(memory_budget=270 * MIB))
    assert plan.fits and (line := shortfall(plan)) is not None
    assert line.startswith(f"conversations of up to {plan.largest_context:,} tokens fit, the model was made for 8,192")
    assert f"--memory-budget leaves {plan.kv_bytes / MIB:.1f} MiB for K/V, 45 KiB a token" in line
    assert shortfall(plan_memory(MAC_16, small, Wish())) is None


def test_a_plan_says_what_bounds_the_pool() -> None:
    roomy = plan_memory(MAC_128, need(9.0, context=8192), Wish(pool_rows=4))
    assert (roomy.most_contexts, roomy.most_blocks) == (4, (4 * 512 + 1,))
    assert roomy.most_bytes == (4 * 512 + 1) * LLAMA_8B.block_bytes < roomy.kv_bytes
    tight = plan_memory(MAC_128, need(9.0), Wish())
    assert tight.most_contexts is None and tight.most_bytes <= tight.kv_bytes
