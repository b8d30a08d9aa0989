"""The engines that scripts/bench_batch.py compares, each answering a Load with a Run: mlxpaged, mlx-lm's
BatchGenerator, static batching and one request at a time. Owns driving them and their clocks; computes no figures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from bench_figures import Load, Run
from mlx_lm.generate import BatchGenerator, GenerationBatch, generate_step
from mlx_lm.sample_utils import make_sampler

from mlxpaged.config import BLOCK_SIZE, EngineConfig
from mlxpaged.engine.build import build
from mlxpaged.errors import EngineError, UnsupportedModel
from mlxpaged.model.kvspec import probe
from mlxpaged.model.loader import LoadedModel
from mlxpaged.model.seam import install_attention, remove_attention
from mlxpaged.sched.events import EndEvent, Event, TokenEvent
from mlxpaged.sched.requests import Request, SamplingParams
from mlxpaged.sched.table import blocks_for


@dataclass(frozen=True, slots=True)
class Sampling:
    """The same for every request and engine; the engines' noise differs. Raises BadParameter out of range."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.params(max_tokens=1, index=0)

    def params(self, max_tokens: int, index: int) -> SamplingParams:
        """Ours for request `index`: exactly max_tokens tokens."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed + index,
            ignore_eos=True,
        )

    def sampler(self) -> Callable[[mx.array], mx.array]:
        """One of mlx-lm's, to be shared by all rows: only then does BatchGenerator sample them in one call."""
        mx.random.seed(self.seed)
        return make_sampler(self.temperature, self.top_p)


class Ours:
    """mlxpaged over `loaded`, its pool as large as `loads` need at most, so that nothing is preempted."""

    def __init__(
        self, loaded: LoadedModel, width: int, loads: list[Load], sampling: Sampling, step_budget: int | None = None
    ) -> None:
        self._weights_bytes = loaded.weights_bytes
        self._width = width
        self._sampling = sampling
        most_requests = max(len(load.prompts) for load in loads)
        self._before_bytes = mx.get_active_memory()
        config = EngineConfig(
            max_rows=width,
            max_queue=most_requests,
            num_blocks=max(blocks_needed(load, width) for load in loads),
            step_budget=step_budget,
        )
        built = build(loaded, config)
        if built.served_by != "paged":
            raise UnsupportedModel(f"there is nothing to compare: {'; '.join(built.notes)}")
        self.core = built.core
        spec = probe(loaded.model)
        self._block_bytes = [spec.block_bytes(group) for group in range(len(spec.windows))]
        self.slot_bytes = sum(self._block_bytes) / BLOCK_SIZE

    @property
    def pool_slots(self) -> int:
        return sum(pool.num_blocks - 1 for pool in self.core.scheduler.blocks.pools) * BLOCK_SIZE

    def resident_bytes(self) -> int:
        """What the engine holds between runs, pool included; it lies in memory while the others run."""
        return max(0, mx.get_active_memory() - self._before_bytes)

    def serve(self, load: Load) -> Run:
        """Nothing of earlier runs is found: each starts with an empty prefix cache."""
        core, run = self.core, Run.of(load, self._width)
        scheduler = core.scheduler
        scheduler.blocks.forget()
        steps, cached = scheduler.steps, scheduler.cached_tokens
        _settle()
        started = time.perf_counter()

        def take(events: list[Event]) -> None:
            now = time.perf_counter() - started
            for event in events:
                match event:
                    case TokenEvent(request_id, token_id):
                        run.take(request_id, token_id, now)
                    case EndEvent(request_id, finish, error):
                        raise EngineError(f"request {request_id} ended early ({finish}): {error or 'no room'}")

        self._add(load)
        while not core.idle:
            core.step(take)
            run.slots.note(*self._slots())
        run.wall_s = time.perf_counter() - started
        run.steps = scheduler.steps - steps
        run.peak_memory_bytes = mx.get_peak_memory()
        run.above_weights_bytes = run.peak_memory_bytes - self._weights_bytes
        run.extra = {"cached_tokens": scheduler.cached_tokens - cached, "steps": run.steps}
        return run

    def decode(self, load: Load, warm_steps: int) -> Callable[[int], None]:
        """Runs `load` until each of its rows has decoded so many tokens. What is given back runs further steps."""
        self._add(load)

        def run(steps: int) -> None:
            for _ in range(steps):
                self.core.step(lambda events: None)

        while any(live.generated < warm_steps for live in self.core.scheduler.live()):
            run(1)
        return run

    def _add(self, load: Load) -> None:
        for index, (prompt, new) in enumerate(zip(load.prompts, load.new, strict=True)):
            self.core.add(Request(index, np.asarray(prompt, np.int32), self._sampling.params(new, index)))

    def _slots(self) -> tuple[float, int]:
        """(slots of blocks that rows hold, tokens of those rows whose K and V are committed)."""
        scheduler = self.core.scheduler
        held = [pool.num_blocks - 1 - pool.num_free for pool in scheduler.blocks.pools]
        held_bytes = sum(count * size for count, size in zip(held, self._block_bytes, strict=True))
        table = scheduler.table
        return held_bytes / self.slot_bytes, int(table.computed[table.active].sum())


def blocks_needed(load: Load, width: int) -> int:
    """Blocks that the `width` longest requests hold at their end, a spare one each for a partly shared block, and the
    null block."""
    blocks = sorted(
        (blocks_for(len(prompt) + new) for prompt, new in zip(load.prompts, load.new, strict=True)), reverse=True
    )
    return sum(blocks[:width]) + width + 1


class Theirs:
    """Stock mlx-lm over `model`, in its three ways of serving. `ours` tells what else lies in memory."""

    def __init__(self, model: nn.Module, width: int, ours: Ours, weights_bytes: int, sampling: Sampling) -> None:
        self._model = model
        self._width = width
        self._ours = ours
        self._weights_bytes = weights_bytes
        self._sampling = sampling

    def serve(self, load: Load) -> Run:
        """BatchGenerator: continuous batching over dense caches, with its default of 8 prompts a prefill batch."""
        with self._measured(load) as (run, started):
            generator = BatchGenerator(
                self._model,
                sampler=self._sampling.sampler(),
                completion_batch_size=self._width,
                prefill_batch_size=min(8, self._width),  # it would run as many rows, too
            )
            with generator.stats() as stats:
                self._drain(generator, dict(enumerate(generator.insert(load.prompts, load.new))), run, started)
            run.extra = {
                "own_prompt_tok_s": round(stats.prompt_tps, 2),
                "own_gen_tok_s": round(stats.generation_tps, 2),
            }
            generator.close()
        return run

    def serve_static(self, load: Load) -> Run:
        """Static batching: `width` requests start together and all run to the length of the longest; what a reply has
        too much is dropped, and the next ones start when the last has ended."""
        with self._measured(load) as (run, started):
            for first in range(0, len(load.prompts), self._width):
                prompts, new = load.prompts[first : first + self._width], load.new[first : first + self._width]
                generator = BatchGenerator(
                    self._model,
                    sampler=self._sampling.sampler(),
                    completion_batch_size=len(prompts),
                    prefill_batch_size=len(prompts),
                )
                uids = generator.insert(prompts, [max(new)] * len(new))
                self._drain(generator, dict(enumerate(uids, first)), run, started)
                generator.close()
        return run

    def serve_sequential(self, load: Load) -> Run:
        """One request at a time, in order of arrival."""
        with self._measured(load) as (run, started):
            for index, (prompt, new) in enumerate(zip(load.prompts, load.new, strict=True)):
                tokens = generate_step(mx.array(prompt), self._model, max_tokens=new, sampler=self._sampling.sampler())
                for token, _ in tokens:
                    run.take(index, int(token), time.perf_counter() - started)
                    run.steps += 1
        return run

    def _drain(self, generator: BatchGenerator, uids: dict[int, int], run: Run, started: float) -> None:
        """Step until all requests of `uids` (number in the load -> generator's id) have ended; tokens beyond what a
        request asked for are dropped."""
        place = {uid: index for index, uid in uids.items()}
        computed: dict[int, int] = {}  # uid of a live request -> tokens whose K and V are in the cache
        ended = 0
        while ended < len(uids):
            prompts, tokens = generator.next()
            now = time.perf_counter() - started
            run.steps += bool(tokens)
            for token in tokens:
                index = place[token.uid]
                if len(run.replies[index]) < run.load.new[index]:
                    run.take(index, token.token, now)
                ended += self._count(token, computed)
            for prompt in prompts:
                computed[prompt.uid] = prompt.progress[0]
            run.slots.note(generator.prompt_cache_nbytes / self._ours.slot_bytes, sum(computed.values()))

    @staticmethod
    def _count(token: GenerationBatch.Response, computed: dict[int, int]) -> bool:
        """One more token's K and V are in the cache; True when it was the last and its row has left."""
        if token.finish_reason is not None:
            computed.pop(token.uid, None)
            return True
        computed[token.uid] += 1
        return False

    @contextmanager
    def _measured(self, load: Load) -> Iterator[tuple[Run, float]]:
        """A run with mlx-lm's own attention function in place, timed, its memory read without what is ours."""
        run = Run.of(load, self._width)
        ours_bytes = self._ours.resident_bytes()
        remove_attention()
        _settle()
        started = time.perf_counter()
        try:
            yield run, started
            run.wall_s = time.perf_counter() - started
            run.peak_memory_bytes = mx.get_peak_memory() - ours_bytes
            run.above_weights_bytes = run.peak_memory_bytes - self._weights_bytes
        finally:
            install_attention(self._model)


def _settle() -> None:
    """Let nothing of the last run reach into this one."""
    gc.collect()
    mx.synchronize()
    mx.reset_peak_memory()
