"""What one run of a bench gave, and the figures read off it. Owns the definitions of every rate, latency and ratio;
never imports mlx and measures nothing itself, so that both engines are judged by the same arrival times."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, Any]

RATIOS = {
    "out_tok_s": "out_tok_s_ratio",
    "decode_tok_s": "decode_tok_s_ratio",
    "prefill_tok_s": "prefill_tok_s_ratio",
    "ttft_p50_s": "ttft_p50_ratio",
    "itl_p95_s": "itl_p95_ratio",
    "peak_memory_bytes": "peak_memory_ratio",
}
"""Figure -> the key of its ratio, ours / theirs. Rates: above 1 is better. Latencies and memory: below 1 is better."""


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts that arrive at once (ids), and how many tokens to reply to each."""

    prompts: list[list[int]]
    new: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass
class SlotUse:
    """KV slots (a token's K and V, all layers) that a run held, and tokens whose K and V it needed, over its steps."""

    at_peak: tuple[float, int] = (0.0, 0)  # (allocated, used) when most were allocated
    allocated_sum: float = 0.0
    used_sum: int = 0

    def note(self, allocated: float, used: int) -> None:
        self.at_peak = max(self.at_peak, (allocated, used))
        self.allocated_sum += allocated
        self.used_sum += used

    def figures(self) -> Figures:
        """`kv_used_share` is over all steps; above 1 where requests share blocks."""
        return {
            "kv_slots_allocated": round(self.at_peak[0]),
            "kv_slots_used": self.at_peak[1],
            "kv_used_share": round(self.used_sum / self.allocated_sum, 4) if self.allocated_sum else None,
        }


@dataclass
class Run:
    """One engine's answer to one load. `arrivals[i]` are the seconds from the load's start at which the tokens
    `replies[i]` of request i could be read. `steps` counts forwards that made tokens for up to `width` rows."""

    load: Load
    width: int
    arrivals: list[list[float]]
    replies: list[list[int]]
    steps: int = 0
    wall_s: float = 0.0
    peak_memory_bytes: int = 0
    above_weights_bytes: int = 0
    slots: SlotUse = field(default_factory=SlotUse)
    extra: Figures = field(default_factory=dict)

    @classmethod
    def of(cls, load: Load, width: int) -> Run:
        return cls(load, width, [[] for _ in load.prompts], [[] for _ in load.prompts])

    def take(self, request: int, token_id: int, seconds: float) -> None:
        self.arrivals[request].append(seconds)
        self.replies[request].append(token_id)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.replies))


def figures(run: Run) -> Figures:
    """Rates and latencies of one run.

    out: reply tokens over the whole time. prefill: prompt tokens over the time until every request has its first
    token; replies that run meanwhile are not counted and not subtracted. decode: see decode_rate(). itl: gaps between
    a reply's tokens, all replies together.
    """
    first = [times[0] for times in run.arrivals]
    gaps = [after - before for times in run.arrivals for before, after in itertools.pairwise(times)]
    rate, rows = decode_rate(run.arrivals)
    return {
        "wall_s": round(run.wall_s, 4),
        "out_tok_s": round(run.num_tokens / run.wall_s, 2),
        "decode_tok_s": round(rate, 2),
        "decode_rows": rows,
        "prefill_tok_s": round(run.load.num_prompt_tokens / max(first), 2),
        "ttft_p50_s": round(statistics.median(first), 5),
        "ttft_p95_s": round(percentile(first, 0.95), 5),
        "ttft_max_s": round(max(first), 5),
        "itl_p50_s": round(statistics.median(gaps), 6),
        "itl_p95_s": round(percentile(gaps, 0.95), 6),
        "peak_memory_bytes": run.peak_memory_bytes,
        "above_weights_bytes": run.above_weights_bytes,
        **run.slots.figures(),
        **run.extra,
    }


def decode_rate(arrivals: list[list[float]]) -> tuple[float, int]:
    """(tokens per second, rows) over the time when most replies were between their first and last token at once: with
    prompts that arrive together, the time when no prompt is left and no reply has ended."""
    edges = sorted({moment for times in arrivals for moment in (times[0], times[-1])})
    spans = list(itertools.pairwise(edges))
    rows = [sum(times[0] <= begin and end <= times[-1] for times in arrivals) for begin, end in spans]
    most = max(rows, default=0)
    widest = [span for span, count in zip(spans, rows, strict=True) if count == most]
    seconds = sum(end - begin for begin, end in widest)
    tokens = sum(times[0] <= begin < moment <= end for begin, end in widest for times in arrivals for moment in times)
    return (tokens / seconds, most) if seconds else (0.0, most)


def occupancy(run: Run) -> float:
    """Share of the batch's places that made a token somebody asked for: 1 when every step fills all `width` rows."""
    return run.num_tokens / (run.width * run.steps)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def medians(runs: list[Figures]) -> Figures:
    """Each figure's median over the repeats."""
    return {key: _median([run[key] for run in runs]) for key in runs[0]}


def paired_ratios(ours: list[Figures], theirs: list[Figures]) -> Figures:
    """Every ratio of RATIOS: the median over repeats of ours / theirs, which ran right beside each other, so that a
    machine that slows down for a while slows both; and under `ratio_ranges` the least and the greatest."""
    found: Figures = {}
    ranges: Figures = {}
    for figure, key in RATIOS.items():
        pairs = [mine[figure] / other[figure] for mine, other in zip(ours, theirs, strict=True) if other[figure]]
        found[key] = round(statistics.median(pairs), 4) if pairs else None
        ranges[key] = [round(min(pairs), 4), round(max(pairs), 4)] if pairs else None
    return {**found, "ratio_ranges": ranges}


def own_ratio(ours: list[Figures], theirs: list[Figures]) -> float:
    """Our decode rate against the generation rate that BatchGenerator tells of itself: median over the repeats. Its
    clock runs whenever some of its rows decode, ours only while all do."""
    pairs = [mine["decode_tok_s"] / other["own_gen_tok_s"] for mine, other in zip(ours, theirs, strict=True)]
    return round(statistics.median(pairs), 4)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> Figures:
    """How far two sets of greedy replies are the same, up to each reply's first difference."""
    common = [
        next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))
        for mine, other in zip(ours, theirs, strict=True)
    ]
    equal = sum(length == len(mine) for length, mine in zip(common, ours, strict=True))
    share = sum(common) / max(1, sum(map(len, ours)))
    return {"replies": len(ours), "equal_replies": equal, "equal_token_share": round(share, 4)}


def _median(values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    middle = statistics.median(known)
    return round(middle) if all(isinstance(value, int) for value in known) else round(middle, 6)
