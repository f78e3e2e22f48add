"""What `/metrics` shows: times seen by clients, and each engine's counters (Prometheus text format).

Names follow vLLM's (v1/metrics/loggers.py) under the prefix `quantd_`, so its dashboards need little
change. Times in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quantd.daemon.llama_metrics import LlamaServerMetrics, Totals
from quantd.engine.messages import Stats

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)

_GAUGES = (
    ("num_running", "num_requests_running", "Requests that steps compute"),
    ("num_waiting", "num_requests_waiting", "Requests that wait for their first step"),
    ("blocks_total", "kv_blocks", "Blocks of the KV cache"),
    ("blocks_free", "kv_blocks_free", "Blocks that hold nothing"),
    ("blocks_cached", "kv_blocks_cached", "Blocks that only the prefix cache holds"),
)
_COUNTERS = (
    ("steps", "steps", "Forward passes"),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens computed"),
    ("generated_tokens", "generation_tokens", "Tokens generated"),
    ("prefix_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache"),
    ("prefix_hits", "prefix_cache_hits", "Tokens found in the prefix cache"),
    ("disk_hits", "prefix_cache_disk_hits", "Tokens of the prefix cache read from disk"),
    ("preemptions", "num_preemptions", "Requests put back to make room"),
    ("evictions", "prefix_cache_evictions", "Cached blocks given up to make room"),
    ("aborts", "num_aborts", "Requests whose client left"),
)


class Timer:
    """The clock of one choice, from its start on."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._started = time.perf_counter()
        self._latest: float | None = None

    def tokens(self, count: int) -> None:
        """Note that so many tokens came."""
        if not count:
            return
        now = time.perf_counter()
        if self._latest is None:
            self._metrics.first_token.labels(self._model).observe(now - self._started)
        else:
            self._metrics.inter_token.labels(self._model).observe((now - self._latest) / count)
        self._latest = now

    def finish(self, reason: str) -> None:
        """Note the end."""
        self._metrics.finished.labels(self._model, reason).inc()
        self._metrics.end_to_end.labels(self._model).observe(time.perf_counter() - self._started)


class Metrics:
    """The daemon's own counts, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.first_token = self._histogram(
            "time_to_first_token", "From admission to the first token", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram("inter_token_latency", "Between tokens", _INTER_TOKEN_BUCKETS)
        self.end_to_end = self._histogram(
            "e2e_request_latency", "From admission to the last token", _REQUEST_BUCKETS
        )
        self.finished = Counter(
            "quantd_requests_finished",
            "Continuations ended, by reason",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.totals = Totals()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"quantd_{name}_seconds", text, ("model_name",), buckets=buckets, registry=self._registry
        )

    def timer(self, model: str) -> Timer:
        """A clock that starts now."""
        return Timer(self, model)

    def render(self, engines: Mapping[str, Stats]) -> bytes:
        """The page, with each engine's present state."""
        snapshot = CollectorRegistry()
        snapshot.register(_Snapshot(engines))
        snapshot.register(LlamaServerMetrics(self.totals, engines))
        return generate_latest(self._registry) + generate_latest(snapshot)


class _Snapshot:
    """Engine states as metrics, for one page."""

    def __init__(self, engines: Mapping[str, Stats]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        for field, name, text in _GAUGES:
            gauge = GaugeMetricFamily(f"quantd_{name}", text, labels=("model_name",))
            for model, stats in self._engines.items():
                gauge.add_metric((model,), getattr(stats, field))
            yield gauge
        for field, name, text in _COUNTERS:
            counter = CounterMetricFamily(f"quantd_{name}", text, labels=("model_name",))
            for model, stats in self._engines.items():
                counter.add_metric((model,), getattr(stats, field))
            yield counter
        yield self._usage()

    def _usage(self) -> Metric:
        gauge = GaugeMetricFamily(
            "quantd_kv_cache_usage_perc",
            "Part of the KV cache that requests hold, 0 to 1",
            labels=("model_name",),
        )
        for model, stats in self._engines.items():
            held = stats.blocks_total - stats.blocks_free - stats.blocks_cached
            gauge.add_metric((model,), held / max(stats.blocks_total, 1))
        return gauge
