"""The whole engine on emulated Metal text: scheduler, runner and our kernels give stock mlx-lm's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.model import serving
from mlxpaged.model.kernelpool import KernelPool
from mlxpaged.model.kvspec import KVSpec

from ..emulator import FORWARD, EmulatorLauncher, require_tools
from .families import tiny_model
from .rig import Rig, Stock, assert_equal_to_stock

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


def test_the_pools_arrays_are_never_replaced(monkeypatch) -> None:
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
