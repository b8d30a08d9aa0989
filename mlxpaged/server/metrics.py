"""What Prometheus reads: how long clients waited, and the engine's own counts. Owns one registry; knows no route.

Names are those of vLLM with our prefix, so that its dashboards need only that change.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.events import Delta, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The registry of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token.", _WAIT_S)
        self._gaps = _Gaps()
        self._registry.register(self._gaps)
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its end.", _WAIT_S)
        self._ended = self._counter("request_success", "Replies that ended, by why.", ("finished_reason",))
        self._aborted = self._counter("request_aborted", "Replies whose client left, or that failed.")
        self._engine = _EngineCollector()
        self._registry.register(self._engine)

    def watch(self, num_replies: int) -> Watch:
        """An observer of one response's deltas."""
        return Watch(self, num_replies)

    def render(self, stats: EngineStats) -> bytes:
        """Everything in Prometheus' text format, the engine as `stats` shows it."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"mlxpaged_{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"mlxpaged_{name}", text, labels, registry=self._registry)


class Watch:
    """Observes the replies of one response: call it with every delta, and `close` it at the end."""

    def __init__(self, metrics: Metrics, num_replies: int) -> None:
        self._metrics = metrics
        self._begun = time.monotonic()
        self._last = [0.0] * num_replies
        self._open = num_replies

    def __call__(self, index: int, delta: Delta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            last, self._last[index] = self._last[index], now
            if last:
                self._metrics._gaps.observe(now - last)
            else:
                self._metrics._first.observe(now - self._begun)
        if delta.finish in {"stop", "length"}:
            self._open -= 1
            self._metrics._whole.observe(now - self._begun)
            self._metrics._ended.labels(delta.finish).inc()

    def close(self) -> None:
        """Whatever has not ended by now was given up."""
        self._metrics._aborted.inc(self._open)
        self._open = 0


class _Gaps(Collector):
    """The histogram of inter-token latencies. It counts by itself: the library's own costs several times as much, and
    this one is asked once a token."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_GAP_S) + 1)
        self._sum = 0.0

    def observe(self, gap_s: float) -> None:
        self._counts[bisect_left(_GAP_S, gap_s)] += 1
        self._sum += gap_s

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in _GAP_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        text = "Between a reply's tokens."
        yield HistogramMetricFamily("mlxpaged_inter_token_latency_seconds", text, buckets, sum_value=self._sum)


class _EngineCollector(Collector):
    """The engine's counts as metrics, made anew for each scrape."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        total = stats.blocks_total or 1
        yield _gauge("num_requests_running", "Replies being made.", stats.num_running)
        yield _gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks held by replies, 0 to 1.", stats.blocks_used / total)
        blocks = GaugeMetricFamily("mlxpaged_kv_blocks", "KV blocks by state.", labels=["state"])
        for state in ("total", "used", "shared", "cached", "free"):
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        yield _count("prompt_tokens", "Tokens of admitted prompts.", stats.prompt_tokens)
        yield _count("generation_tokens", "Tokens sampled.", stats.generated_tokens)
        yield _count("prefix_cache_queries", "Prompt tokens looked for.", stats.prompt_tokens)
        yield _count("prefix_cache_hits", "Prompt tokens found.", stats.cached_tokens)
        yield _count("num_preemptions", "Rows that gave their blocks back.", stats.preemptions)
        yield _count("kv_block_evictions", "Findable blocks taken for something else.", stats.evictions)
        yield _count("engine_steps", "Steps computed.", stats.steps)
        yield _gauge("engine_heartbeat_seconds", "Since the engine last turned its loop.", stats.heartbeat_s)
        yield _gauge("model_load_seconds", "What loading the model took.", stats.load_s)
        memory = GaugeMetricFamily("mlxpaged_memory_bytes", "Memory of MLX, and of the KV pool.", labels=["kind"])
        for kind in ("active", "peak", "cache"):
            memory.add_metric([kind], getattr(stats, f"memory_{kind}_bytes"))
        memory.add_metric(["kv_pool"], stats.memory_bytes)
        yield memory


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"mlxpaged_{name}", text, value=value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"mlxpaged_{name}", text, value=value)
