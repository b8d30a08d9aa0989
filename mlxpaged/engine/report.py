"""One file about one machine that a person can paste into an issue. Owns its sections, their order and the guard around
each; what is measured lies in model/. Runs on the calling thread, which becomes MLX's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..config import Attention, EngineConfig
from ..model import measure
from ..model.kvspec import KVSpec, NotPaged, probe
from ..model.loader import LoadedModel
from ..model.measure import Arrivals, KernelLab
from ..model.startup import Startup
from ..sched.events import EndEvent, Event, TokenEvent
from ..sched.requests import Request, SamplingParams
from ..sched.table import blocks_for
from .build import build
from .core import EngineCore

Data = dict[str, Any] | list[dict[str, Any]]
_SHORT_S = 60.0


class Skipped(Exception):
    """A section has nothing to say here; the text says why."""


@dataclass(frozen=True)
class Subject:
    """What is examined: a model, the process's settings, and how long all sections together may take."""

    loaded: LoadedModel
    startup: Startup
    budget_s: float
    attention: Attention = "auto"

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a prompt and of a reply. Short ones start together even under a CPU's small step budget."""
        return (64, 64) if self.budget_s > _SHORT_S else (7, 16)


@dataclass(frozen=True)
class Section:
    """What one part found: its `data`, or a `note` that says why there is none."""

    title: str
    status: Literal["ok", "skipped", "failed"]
    data: Data
    note: str = ""
    seconds: float = 0.0


def make_report(subject: Subject, on_progress: Callable[[str], None]) -> list[Section]:
    """Every section, in order. One that raises is a failed one; those left when the time is up are skipped."""
    started = time.monotonic()
    done = []
    for title, run in _sections(subject).items():
        spent_s = time.monotonic() - started
        if spent_s > subject.budget_s:
            done.append(Section(title, "skipped", {}, f"out of time after {spent_s:.0f} s"))
            continue
        on_progress(title)
        done.append(_guarded(title, run))
    return done


def _guarded(title: str, run: Callable[[], Data]) -> Section:
    started = time.monotonic()
    try:
        status, data, note = "ok", run(), ""
    except Skipped as reason:
        status, data, note = "skipped", {}, str(reason)
    except Exception as error:  # one failure must not lose the rest
        status, data, note = "failed", {}, f"{type(error).__name__}: {error}"
    return Section(title, status, data, note, round(time.monotonic() - started, 2))  # type: ignore[arg-type]


def _sections(subject: Subject) -> dict[str, Callable[[], Data]]:
    loaded = subject.loaded
    share_s = subject.budget_s / 8
    twin = measure.stock_twin(loaded)  # before serving installs anything in the model
    return {
        "Kernels against references": lambda: _lab(loaded).selftest(),
        "Writing in place": lambda: _lab(loaded).in_place(),
        "First launch of a kernel": lambda: _lab(loaded).first_launches(),
        "Decode attention": lambda: _lab(loaded).rates(share_s),
        "Quantised products by layout": lambda: [measure.matmul_layouts(rows) for rows in (1, 8, 64)],
        "Command buffers of a step (predicted)": lambda: measure.commits(loaded, subject.startup.encoder),
        "Gap between steps": lambda: gap(subject),
        "Decode against mlx-lm": lambda: [against_stock(subject, twin, rows) for rows in (1, 8)],
    }


def _lab(loaded: LoadedModel) -> KernelLab:
    lab = KernelLab.here(_spec(loaded))
    if lab is None:
        raise Skipped("CPU")
    return lab


def _spec(loaded: LoadedModel) -> KVSpec:
    try:
        return probe(loaded.model)
    except NotPaged as reason:
        raise Skipped(f"{loaded.name} is not served by the block pool: {reason}") from None


def gap(subject: Subject) -> dict[str, Any]:
    """Milliseconds of a decode step of one row when each is waited for, and when the next one is launched before."""
    prompts, new = _prompts(subject, 1), subject.lengths[1]
    waited, ahead = (1e3 / rate(arrivals(_core(subject, 1, ahead), prompts, new)) for ahead in (0, 1))
    return {"waited_ms": round(waited, 3), "one_ahead_ms": round(ahead, 3), "gap_ms": round(waited - ahead, 3)}


def against_stock(subject: Subject, twin: Any, rows: int) -> dict[str, Any]:
    """Decode rates of `rows` replies at once, ours and mlx-lm's BatchGenerator's (over `twin`), the better of two
    alternating runs each."""
    prompts, new = _prompts(subject, rows), subject.lengths[1]
    ours, theirs = [], []
    for _ in range(2):
        theirs.append(rate(measure.stock_arrivals(twin, prompts, new)))
        ours.append(rate(arrivals(_core(subject, rows, ahead=None), prompts, new)))
    return {
        "rows": rows,
        "mlxpaged_tok_s": round(max(ours), 1),
        "mlx_lm_tok_s": round(max(theirs), 1),
        "ratio": round(max(ours) / max(theirs), 3),
    }


def _prompts(subject: Subject, rows: int) -> list[list[int]]:
    """Different ones, so that no prefix is shared."""
    most = int(subject.loaded.config.get("vocab_size", 256))
    return [[(row * 31 + place * 7) % min(most, 256) for place in range(subject.lengths[0])] for row in range(rows)]


def _core(subject: Subject, rows: int, ahead: int | None) -> EngineCore:
    num_blocks = rows * (blocks_for(sum(subject.lengths)) + 1) + 1
    config = EngineConfig(max_rows=rows, num_blocks=num_blocks, ahead=ahead, attention=subject.attention)
    return build(subject.loaded, config).core


def arrivals(core: EngineCore, prompts: list[list[int]], new: int) -> Arrivals:
    """When our engine gave each of `new` greedy tokens to each prompt."""
    found: Arrivals = []

    def take(events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            match event:
                case TokenEvent(request_id):
                    found.append((now, request_id))
                case EndEvent(_, _, error) if error:
                    raise RuntimeError(error)

    sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, seed=0)
    for number, prompt in enumerate(prompts):
        core.add(Request(number, np.asarray(prompt, np.int32), sampling, frozenset()))
    while not core.idle:
        core.step(take)
    return found


def rate(found: Arrivals) -> float:
    """Tokens a second while all requests were decoding: from the last one's first token to the first one's last."""
    times: dict[int, list[float]] = {}
    for moment, number in found:
        times.setdefault(number, []).append(moment)
    begin, end = max(own[0] for own in times.values()), min(own[-1] for own in times.values())
    count = sum(begin < moment <= end for moment, _ in found)
    if not count or end <= begin:
        raise ValueError(f"{len(found)} tokens of {len(times)} requests are too few to tell a rate")
    return count / (end - begin)
