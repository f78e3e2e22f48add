"""What `/metrics` shows: what clients asked and saw, and each engine's state (Prometheus text format).

Names, units and meanings follow vLLM's (v1/metrics/loggers.py) under the prefix `quantd_`, so its dashboards
need little change. Counters go on over an unload or a crash of an engine. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quantd.daemon.activity import Progress, RequestRecord
from quantd.daemon.engine_totals import ENGINE_COUNTERS, EngineCounts
from quantd.daemon.llama_metrics import LlamaServerMetrics, Totals
from quantd.engine.messages import Stats

MOST_MODELS = 100
"""Models with series of their own; later ones share a label."""
_OTHER = "other"

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_INTER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
_REQUEST = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
_QUEUE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the engine's getting it to the first token", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between tokens", _INTER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean of an answer's times between tokens", _INTER_TOKEN),
    "e2e_request_latency_seconds": ("From the engine's getting it to the last token", _REQUEST),
    "request_queue_time_seconds": ("From the engine's getting it to its first step", _QUEUE),
    "request_prefill_time_seconds": ("From the first step to the first token", _FIRST_TOKEN),
    "request_decode_time_seconds": ("From the first token to the last", _REQUEST),
    "request_prompt_tokens": ("Tokens of the prompt", _TOKENS),
    "request_generation_tokens": ("Tokens generated", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were computed, cached ones included",
    "generation_tokens": "Tokens generated",
    "prefix_cache_queries": "Tokens looked up in the prefix cache",
    "prefix_cache_hits": "Tokens found in the prefix cache",
}
_GAUGES = (
    ("num_running", "num_requests_running", "Requests that steps compute"),
    ("num_waiting", "num_requests_waiting", "Requests that wait for their first step"),
    ("blocks_total", "kv_blocks", "Blocks of the KV cache"),
    ("blocks_free", "kv_blocks_free", "Blocks that hold nothing"),
    ("blocks_cached", "kv_blocks_cached", "Blocks that only the prefix cache holds"),
)
_ENGINE_TEXTS = {
    "steps": ("engine_steps", "Forward passes"),
    "computed_tokens": ("computed_tokens", "Tokens that steps computed, of prompts and answers"),
    "disk_hits": ("prefix_cache_disk_hits", "Tokens of the prefix cache read from disk"),
    "preemptions": ("num_preemptions", "Requests put back to make room"),
    "evictions": ("prefix_cache_evictions", "Cached blocks given up to make room"),
}


class Metrics:
    """The daemon's own counts, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.histograms = {
            name: Histogram(f"quantd_{name}", text, ("model_name",), buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.counters = {name: self._counter(name, text, "model_name") for name, text in _COUNTERS.items()}
        self.finished = self._counter(
            "request_success",
            "Engine requests ended, by reason; abort: the client left",
            "model_name",
            "finished_reason",
        )
        self._exchanges = self._counter(
            "http_requests", "HTTP requests answered, by route", "handler", "method", "status"
        )
        self.totals = Totals()
        self._models: dict[str, ModelMetrics] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"quantd_{name}", text, labels, registry=self._registry)

    def of(self, model: str) -> ModelMetrics:
        """The counts of a model."""
        label = model if model in self._models or len(self._models) < MOST_MODELS else _OTHER
        if label not in self._models:
            self._models[label] = ModelMetrics(self, label)
        return self._models[label]

    def exchange(self, record: RequestRecord) -> None:
        """Count an HTTP request that is over. Paths that no route has count as one."""
        method, _, handler = record.route.partition(" ")
        status = "none" if record.status is None else f"{record.status // 100}xx"
        self._exchanges.labels(handler or _OTHER, method or _OTHER, status).inc()

    def render(self, engines: Mapping[str, Stats], counts: Mapping[str, EngineCounts]) -> bytes:
        """The page. engines: their present state. counts: what all engines of each model have counted."""
        snapshot = CollectorRegistry()
        snapshot.register(_Snapshot(engines, self._labelled(counts)))
        snapshot.register(LlamaServerMetrics(self.totals, engines, sum(c["steps"] for c in counts.values())))
        return generate_latest(self._registry) + generate_latest(snapshot)

    def _labelled(self, counts: Mapping[str, EngineCounts]) -> dict[str, EngineCounts]:
        summed: dict[str, EngineCounts] = {}
        for model, count in counts.items():
            label = self.of(model).label
            summed[label] = summed.get(label, EngineCounts()) + count
        return summed


class ModelMetrics:
    """The counts of one model; told of its requests as they go on."""

    def __init__(self, metrics: Metrics, label: str) -> None:
        self._totals = metrics.totals
        self._finished = metrics.finished
        self.label = label
        self._histograms = {name: metric.labels(label) for name, metric in metrics.histograms.items()}
        self._counters = {name: metric.labels(label) for name, metric in metrics.counters.items()}

    def admitted(self, work: Progress) -> None:
        """A request got its turn."""
        self._counters["prompt_tokens"].inc(work.prompt_len)
        self._counters["prefix_cache_queries"].inc(work.prompt_len)
        self._counters["prefix_cache_hits"].inc(work.num_cached or 0)

    def tokens(self, work: Progress, count: int, now: float) -> None:
        """So many tokens came; those that came together share the time since the one before them."""
        self._counters["generation_tokens"].inc(count)
        if work.first is None:
            self._observe("time_to_first_token_seconds", now - work.started)
            gaps, seconds = count - 1, 0.0
        else:
            gaps, seconds = count, (now - work.latest) / count
        for _ in range(gaps):
            self._observe("inter_token_latency_seconds", seconds)

    def ended(self, work: Progress) -> None:
        """A request ended, for whatever reason; times that it did not live to see do not count."""
        self._finished.labels(self.label, work.reason).inc()
        self._observe("e2e_request_latency_seconds", work.ended - work.started)
        self._observe("request_prompt_tokens", work.prompt_len)
        self._observe("request_generation_tokens", work.num_tokens)
        if work.admitted is not None:
            self._observe("request_queue_time_seconds", max(work.admitted - work.started, 0.0))
        if work.admitted is not None and work.first is not None:
            self._observe("request_prefill_time_seconds", max(work.first - work.admitted, 0.0))
        if work.num_tokens:
            self._observe("request_decode_time_seconds", work.decode_seconds)
        if work.num_tokens > 1:
            per_token = work.decode_seconds / (work.num_tokens - 1)
            self._observe("request_time_per_output_token_seconds", per_token)
        self._totals.add(
            work.prompt_len, work.num_cached or 0, work.prompt_seconds, work.num_tokens, work.decode_seconds
        )

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class _Snapshot:
    """Engine states as metrics, for one page."""

    def __init__(self, engines: Mapping[str, Stats], counts: Mapping[str, EngineCounts]) -> None:
        self._engines = engines
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        for field, name, text in _GAUGES:
            gauge = GaugeMetricFamily(f"quantd_{name}", text, labels=("model_name",))
            for model, stats in self._engines.items():
                gauge.add_metric((model,), getattr(stats, field))
            yield gauge
        for field in ENGINE_COUNTERS:
            name, text = _ENGINE_TEXTS[field]
            counter = CounterMetricFamily(f"quantd_{name}", text, labels=("model_name",))
            for model, counts in self._counts.items():
                counter.add_metric((model,), counts[field])
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
