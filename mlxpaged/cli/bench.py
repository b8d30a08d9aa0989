"""`mlxpaged bench`: figures about the engine, one JSON line on stdout."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, EngineError
from . import options
from .exits import complain

if TYPE_CHECKING:
    from ..engine.events import Delta
    from ..engine.service import EngineService

bench = typer.Typer(help="Measure speed; prints JSON.", no_args_is_help=True)


@dataclass
class _Timeline:
    """When one request's tokens arrived, seconds on one clock; filled on the engine's thread."""

    started: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, ids that came with it)
    last: Delta | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, delta: Delta) -> None:
        if delta.token_ids:
            self.arrivals.append((time.perf_counter(), len(delta.token_ids)))
        if delta.finish:
            self.last = delta
            self.done.set()

    def gaps(self) -> list[float]:
        times = [moment for moment, _ in self.arrivals]
        return [after - before for before, after in itertools.pairwise(times)]


@bench.command("engine")
def bench_engine(
    model: options.ModelArgument = "smollm2",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts answered at the same time.")] = 8,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens of each reply.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs; the median one is reported.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Which random prompts.")] = 0,
    dtype: options.DtypeFlag = "auto",
    ctx: options.ContextFlag = None,
    memory_budget: options.MemoryBudget = None,
    step_budget: options.StepBudget = None,
    attention: options.AttentionFlag = "auto",
) -> None:
    """Answer a batch of random prompts through the engine and print one JSON line of rates and latencies."""
    import random

    from .compose import started_engine
    from .progress import LoadProgress, wait_with_bar

    config = options.engine_config(dtype, ctx, memory_budget, step_budget, attention, max_rows=max(batch, 1))
    progress = LoadProgress()
    with started_engine(config) as service:
        info = wait_with_bar(service.load(model, progress), progress)
        if prompt_tokens + max_tokens > info.context_len:
            hint = "" if info.context_len == info.longest_context else " or raise --ctx"
            raise ConfigError(
                f"--prompt-tokens {prompt_tokens} and --max-tokens {max_tokens} together pass the context of "
                f"{info.context_len} tokens; lower one{hint}"
            )
        for note in info.notes:
            complain(note)
        complain(
            f"{info.name}: a warm-up and {repeats} more; each run answers {batch} prompts of {prompt_tokens} tokens "
            f"with {max_tokens} tokens"
        )
        random_ids = random.Random(seed)
        runs = []
        for number in range(repeats + 1):  # the first run warms up and is not reported
            prompts = [[random_ids.randrange(info.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
            figures = _run(service, prompts, max_tokens)
            runs.append(figures)
            # Told between the runs: a bar that is redrawn beside a run would be measured too.
            name = f"run {number} of {repeats}" if number else "warm-up"
            complain(f"{name}: {figures['wall_s']:.1f} s, {figures['tokens_per_s']:,.0f} tokens/s")
    runs = sorted(runs[1:], key=lambda figures: figures["tokens_per_s"])
    print(json.dumps({"model": info.name, "served_by": info.served_by, "repeats": repeats, **runs[len(runs) // 2]}))


def _run(service: EngineService, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Submits all prompts at once, waits for all replies, gives one run's figures."""
    from ..sched.requests import FinishReason, SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    timelines = [_Timeline() for _ in prompts]
    begin = time.perf_counter()
    for timeline, prompt in zip(timelines, prompts, strict=True):
        timeline.started = time.perf_counter()
        service.submit(prompt, sampling, timeline.take)
    for timeline in timelines:
        timeline.done.wait()
    wall_s = time.perf_counter() - begin
    for timeline in timelines:
        if timeline.last and timeline.last.finish is FinishReason.ERROR:
            raise EngineError(timeline.last.error or "a request of the bench failed")
    return _figures(timelines, prompts, wall_s)


def _figures(timelines: list[_Timeline], prompts: list[list[int]], wall_s: float) -> dict[str, Any]:
    """Rates and latencies of one run. itl: gaps between a reply's tokens; ttft: from submit to the first."""
    import statistics

    generated = sum(count for timeline in timelines for _, count in timeline.arrivals)
    ttfts = [timeline.arrivals[0][0] - timeline.started for timeline in timelines]
    gaps = [gap for timeline in timelines for gap in timeline.gaps()]
    return {
        "batch": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "completion_tokens": generated,
        "wall_s": round(wall_s, 4),
        "tokens_per_s": round(generated / wall_s, 2),
        "ttft_p50_s": round(statistics.median(ttfts), 4),
        "ttft_p95_s": round(percentile(ttfts, 0.95), 4),
        "itl_p50_s": round(statistics.median(gaps), 5),
        "itl_p95_s": round(percentile(gaps, 0.95), 5),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
