"""The whole engine on emulated Metal text: scheduler, runner and our kernels give stock mlx-lm's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.kernels.launch import KernelSpec
from mlxpaged.kernels.timing import BucketTime, PathChoice
from mlxpaged.model import compiled, kernelpool, serving
from mlxpaged.model.kernelpool import KernelPool
from mlxpaged.model.kvpool import chunk_attention
from mlxpaged.model.kvspec import KVSpec
from mlxpaged.model.linears import LinearWays

from ..emulator import FORWARD, EmulatorLauncher, require_tools
from .families import tiny_model
from .rig import Rig, Stock, assert_equal_to_stock
from .test_prompt_logprobs import assert_equal as assert_scored
from .test_prompt_logprobs import stock_logprobs

NEW = 6
FAMILIES = ("llama", "gpt_oss", "gemma3_text")  # plain; sinks and a window; a window and wide heads


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 199, size).tolist() for size in (50, 1, 17, 33)]


@pytest.fixture(autouse=True)
def emulated(monkeypatch, tmp_path):
    require_tools()
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))

    def pool(spec: KVSpec, num_blocks: Sequence[int], path: object) -> KernelPool:
        return KernelPool(spec, num_blocks, EmulatorLauncher(passes=(FORWARD,)))

    monkeypatch.setattr(serving, "make_pool", pool)


@pytest.mark.parametrize("name", FAMILIES)
def test_emulated_kernels_give_stock_tokens(name) -> None:
    """Chunks of 20 and fewer (gathers and short chunks), decode, a partial prefix hit with copy on write."""
    model, config = tiny_model(name)
    stock = Stock(model)
    rig = Rig(model, config, step_budget=20, num_blocks=40)
    for index, prompt in enumerate(prompts()):
        rig.add(index, prompt, NEW)
    rig.run()
    again = prompts()[0][:40] + prompts()[3]
    rig.add(9, again, NEW)
    replies = rig.run()
    assert rig.cached[9] == 40
    for index, prompt in enumerate(prompts()):
        assert_equal_to_stock(replies[index], stock.reply(prompt, NEW), f"{name} prompt {index}")
    assert_equal_to_stock(replies[9], stock.reply(again, NEW), f"{name} copy on write")


def test_gather_decode_gives_stock_tokens(monkeypatch) -> None:
    """Where timings say so, decode gathers instead: the same tokens."""

    def pool(spec: KVSpec, num_blocks: Sequence[int], path: object) -> KernelPool:
        return KernelPool(spec, num_blocks, EmulatorLauncher(passes=(FORWARD,)), lambda rows, context: False)

    monkeypatch.setattr(serving, "make_pool", pool)
    model, config = tiny_model("gpt_oss")
    stock, rig = Stock(model), Rig(model, config, num_blocks=40)
    for index, prompt in enumerate(prompts()):
        rig.add(index, prompt, NEW)
    replies = rig.run()
    for index, prompt in enumerate(prompts()):
        assert_equal_to_stock(replies[index], stock.reply(prompt, NEW), f"gathered prompt {index}")


@pytest.mark.parametrize("round_chunks", [None, 24])
def test_a_chunk_that_begins_its_row_reads_nothing_from_the_pool(round_chunks, monkeypatch) -> None:
    """Its K and V are at hand; a later chunk's are gathered, once a layer for all chunks of a step."""
    started: list[str] = []
    emulator = EmulatorLauncher(passes=(FORWARD,))

    def launch(spec: KernelSpec, *args: Any, **kwargs: Any) -> list[mx.array]:
        started.append(spec.name)
        return emulator(spec, *args, **kwargs)

    monkeypatch.setattr(serving, "make_pool", lambda *of: KernelPool(*of[:2], launch, round_chunks=round_chunks))
    model, config = tiny_model("gpt_oss")
    stock, rig = Stock(model), Rig(model, config, num_blocks=40, step_budget=100, ahead=0)
    whole, cut = prompts()[0], prompts()[0] + prompts()[3] + prompts()[0]
    rig.add(0, whole, 1)
    rig.step()
    assert started.count("kv_write") == len(model.layers) and "kv_gather" not in started
    rig.add(1, cut, 2)  # finds the first one's blocks
    rig.step()
    assert started.count("kv_gather") == len(model.layers)
    replies = rig.run()
    assert_equal_to_stock(replies[0], stock.reply(whole, 1), "in one chunk")
    assert_equal_to_stock(replies[1], stock.reply(cut, 2), "going on")


def test_attention_that_is_planned_by_its_strides_sees_few_of_them(monkeypatch) -> None:
    """Padded or not, gathered or at hand, views of a joined product or not: one plan for each pair of lengths."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    lengths: set[tuple[int, int]] = set()

    def attention(queries: mx.array, keys: mx.array, values: mx.array, *rest: Any) -> mx.array:
        mx.eval(queries, keys, values)
        seen.add(
            tuple(np.array(array, copy=False).strides[:2] for array in (queries,))
            + tuple(np.array(array, copy=False).strides[2:] for array in (keys, values))
        )
        lengths.add((len(queries), keys.shape[2]))
        return chunk_attention(queries, keys, values, *rest)

    rope = mx.fast.rope

    def strided_rope(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """As on CUDA, where a view's rotation is laid out like the view."""
        return mx.concatenate([rope(x, *args, **kwargs), x], axis=-1)[..., : x.shape[-1]]

    monkeypatch.setattr(mx.fast, "rope", strided_rope)
    monkeypatch.setattr(kernelpool, "chunk_attention", attention)
    monkeypatch.setattr(
        serving, "make_pool", lambda *of: KernelPool(*of[:2], EmulatorLauncher(passes=(FORWARD,)), round_chunks=24)
    )
    monkeypatch.setattr(serving, "linear_ways", lambda *_: LinearWays(join=True))
    model, config = tiny_model("llama")
    stock, rig = Stock(model), Rig(model, config, num_blocks=60, step_budget=48, ahead=0)
    cases = [*prompts(), prompts()[0][:24], prompts()[3] * 3]
    for index, prompt in enumerate(cases):
        rig.add(index, prompt, 2)
    replies = rig.run()
    for index, prompt in enumerate(cases):
        assert_equal_to_stock(replies[index], stock.reply(prompt, 2), f"prompt {index}")
    assert len(seen) == 1 and len(lengths) > 1


def test_no_step_replaces_the_pools_arrays(monkeypatch) -> None:
    made: list[KernelPool] = []

    def pool(spec: KVSpec, num_blocks: Sequence[int], path: object) -> KernelPool:
        made.append(KernelPool(spec, num_blocks, EmulatorLauncher(passes=(FORWARD,))))
        return made[-1]

    monkeypatch.setattr(serving, "make_pool", pool)
    model, config = tiny_model("llama")
    rig = Rig(model, config, num_blocks=12)
    addresses = [np.array(keys, copy=False).ctypes.data for keys, _ in made[0]._pools]
    rig.add(0, prompts()[0], NEW)
    rig.run()
    mx.synchronize()
    assert [np.array(keys, copy=False).ctypes.data for keys, _ in made[0]._pools] == addresses


def test_prompt_logprobs_over_the_kernels_equal_stocks() -> None:
    """Rows of the logits are picked from chunks as well as from decode entries, in one step."""
    model, config = tiny_model("gpt_oss")
    cases = [ids for ids in prompts() if len(ids) > 1]
    expected = [stock_logprobs(model, ids) for ids in cases]
    rig = Rig(model, config, step_budget=20, num_blocks=40)
    for index, ids in enumerate(cases):
        rig.add(index, ids, 2, prompt_logprobs=2 if index else 0)
    rig.run()
    for index, ids in enumerate(cases):
        assert_scored(rig.prompt_logprobs[index], ids, expected[index], 2 if index else 0)


@pytest.mark.parametrize(("name", "graphs"), [("llama", "plain"), ("llama", "fused"), ("gpt_oss", "fused")])
def test_rounded_chunks_and_replayed_graphs_give_stock_tokens(name, graphs, monkeypatch) -> None:
    """As on CUDA: prefill lengths in multiples, decode steps through graphs whose buckets hold empty rows. The
    emulator is eager, so a graph is traced anew at each step instead of being compiled."""

    def pool(spec: KVSpec, num_blocks: Sequence[int], path: object) -> KernelPool:
        return KernelPool(spec, num_blocks, EmulatorLauncher(passes=(FORWARD,)), round_chunks=24)

    traced: list[int] = []

    def trace_only(function):
        def call(*arrays):
            traced.append(len(arrays))
            return function(*arrays)

        return call

    monkeypatch.setattr(serving, "make_pool", pool)
    monkeypatch.setattr(serving, "_graphs", lambda *_: graphs)
    monkeypatch.setattr(serving, "linear_ways", lambda *_: LinearWays(join=True))
    monkeypatch.setattr(compiled, "compile_graph", trace_only)
    monkeypatch.setattr(compiled, "BUCKETS", (3, 5, 16))  # one row and four rows need filling
    model, config = tiny_model(name)
    stock, rig = Stock(model), Rig(model, config, num_blocks=40, step_budget=64)
    for index, prompt in enumerate(prompts()):
        rig.add(index, prompt, NEW + index)
    replies = rig.run()
    assert traced
    for index, prompt in enumerate(prompts()):
        assert_equal_to_stock(replies[index], stock.reply(prompt, NEW + index), f"{name} rounded prompt {index}")


@pytest.mark.parametrize(
    ("times", "lengths"),
    [
        # 85 positions are for the kernel, the 128 that a graph rounds them to would be for the gather
        ((BucketTime(1, 64, 1.0, 2.0), BucketTime(1, 128, 2.0, 1.0)), [84]),
        # likewise 11 rows, and the 12 that a graph for them holds
        ((BucketTime(8, 64, 1.0, 2.0), BucketTime(16, 64, 2.0, 1.0)), [20] * 11),
    ],
)
def test_a_step_has_a_graph_only_where_the_graphs_own_size_is_for_the_kernel(times, lengths, monkeypatch) -> None:
    choice = PathChoice(times)

    def pool(spec: KVSpec, num_blocks: Sequence[int], path: object) -> KernelPool:
        return KernelPool(spec, num_blocks, EmulatorLauncher(passes=(FORWARD,)), choice.use_kernel)

    monkeypatch.setattr(serving, "make_pool", pool)
    monkeypatch.setattr(serving, "_graphs", lambda *_: "fused")
    monkeypatch.setattr(compiled, "compile_graph", lambda function: function)
    model, config = tiny_model("llama")
    stock, rig = Stock(model), Rig(model, config, num_blocks=150, step_budget=512)
    prompts = [[(place * 7 + index) % 199 for place in range(length)] for index, length in enumerate(lengths)]
    for index, prompt in enumerate(prompts):
        rig.add(index, prompt, 4)
    replies = rig.run()
    for index, prompt in enumerate(prompts):
        assert_equal_to_stock(replies[index], stock.reply(prompt, 4), f"prompt {index}")


@pytest.mark.parametrize("ahead", [0, 1])
def test_kernels_give_stock_tokens_through_a_growing_and_shrinking_pool(ahead: int) -> None:
    model, config = tiny_model("gpt_oss")
    stock, rig = Stock(model), Rig(model, config, num_blocks=60, start_blocks=6, step_budget=20, ahead=ahead)
    for index, prompt in enumerate(prompts()):
        rig.add(index, prompt, NEW)
        rig.step()
        if index == 2:
            rig.core.shrink()
            rig.core.scheduler.check()
    replies = rig.run()
    for index, prompt in enumerate(prompts()):
        assert_equal_to_stock(replies[index], stock.reply(prompt, NEW), f"prompt {index}")
    assert min(rig.core.runner.pool.num_blocks) > 6 and rig.core.scheduler.preemptions == 0
    rig.core.shrink()
    assert rig.core.runner.pool.num_blocks == (6, 6)
