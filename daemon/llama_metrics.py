"""llama-server's metrics by its names (llama.cpp, tools/server/README.md).

Its readers know no labels, so these are over all models. Draft tokens and slots per step have no counterpart
here and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quantd.engine.messages import Stats


@dataclass
class Totals:
    """Sums over the answers that have ended. Prompt tokens leave out cached ones. Seconds of each answer."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0
    longest: int = 0

    def add(
        self, prompt_len: int, num_cached: int, prompt_seconds: float, num_tokens: int, decode_seconds: float
    ) -> None:
        """Count one answer."""
        self.prompt_tokens += prompt_len - num_cached
        self.prompt_seconds += prompt_seconds
        self.tokens += num_tokens
        self.decode_seconds += decode_seconds
        self.longest = max(self.longest, prompt_len + num_tokens)


class LlamaServerMetrics:
    """A collector of the totals and the present state of all engines. num_steps: that there ever were."""

    def __init__(self, totals: Totals, engines: Mapping[str, Stats], num_steps: int) -> None:
        self._totals = totals
        self._engines = engines.values()
        self._num_steps = num_steps

    def collect(self) -> Iterable[Metric]:
        totals = self._totals
        yield _counter("prompt_tokens", "Number of prompt tokens processed.", totals.prompt_tokens)
        yield _counter("prompt_seconds", "Prompt process time", totals.prompt_seconds)
        yield _counter("tokens_predicted", "Number of generation tokens processed.", totals.tokens)
        yield _counter("tokens_predicted_seconds", "Predict process time", totals.decode_seconds)
        yield _counter("n_decode", "Forward passes", self._num_steps)
        yield _gauge("n_tokens_max", "Longest prompt and answer", totals.longest)
        prompt_rate = _rate(totals.prompt_tokens, totals.prompt_seconds)
        yield _gauge("prompt_tokens_seconds", "Average prompt throughput in tokens/s.", prompt_rate)
        rate = _rate(totals.tokens, totals.decode_seconds)
        yield _gauge("predicted_tokens_seconds", "Average generation throughput in tokens/s.", rate)
        running = sum(stats.num_running for stats in self._engines)
        yield _gauge("requests_processing", "Number of requests processing.", running)
        waiting = sum(stats.num_waiting for stats in self._engines)
        yield _gauge("requests_deferred", "Number of requests deferred.", waiting)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"llamacpp:{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"llamacpp:{name}", text, value=value)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
