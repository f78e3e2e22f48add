"""Many moments to a few numbers: percentiles, and what a run's requests say together. Times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from quantd.daemon.bench.loads import Load


class Percentiles(msgspec.Struct, frozen=True):
    """The median and the tail of a sample."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Timeline:
    """One streamed request: when it was sent and when each piece of its answer came (one clock, in seconds).

    A piece is the text that one step set free, so it can be more than one token where tokens end inside
    a character. cached_tokens: of the prompt, found in the prefix cache.
    """

    sent: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def first_token(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between one piece and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first one; None where there is no second."""
        seconds = self.arrivals[-1] - self.arrivals[0]
        return (self.completion_tokens - 1) / seconds if seconds else None


@dataclass(frozen=True)
class Run:
    """One pass of a load. slots: (with live tokens, allocated) of the KV cache, sampled on the way."""

    timelines: Sequence[Timeline]
    slots: Sequence[tuple[int, int]]

    @property
    def seconds(self) -> float:
        """From the first request sent to the last token."""
        return max(line.arrivals[-1] for line in self.timelines) - self._begun

    @property
    def output_rate(self) -> float:
        """Tokens a second of all clients together, prefill included."""
        return sum(line.completion_tokens for line in self.timelines) / self.seconds

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, until every client has its first token; cached ones count."""
        seconds = max(line.arrivals[0] for line in self.timelines) - self._begun
        return sum(line.prompt_tokens for line in self.timelines) / seconds

    @property
    def cached_tokens(self) -> int:
        return sum(line.cached_tokens for line in self.timelines)

    @property
    def _begun(self) -> float:
        return min(line.sent for line in self.timelines)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What several passes of a load say.

    seconds, output_rate, prompt_rate, cached_tokens: see Run; the median pass. decode_rate: of one
    client, after its first token, in tokens a second; the median over all requests of all passes.
    first_token, inter_token: over all of them too. kv_utilisation: the part of the allocated slots that
    holds live tokens, 0 to 1, over time; None where the passes were too short to look.
    """

    load: Load
    num_runs: int
    seconds: float
    output_rate: float
    prompt_rate: float
    decode_rate: float | None
    first_token: Percentiles
    inter_token: Percentiles | None
    cached_tokens: int
    kv_utilisation: float | None


def summarize(load: Load, runs: Sequence[Run]) -> Result:
    """The result of the passes of a load, at least one."""
    lines = [line for run in runs for line in run.timelines]
    rates = [line.decode_rate for line in lines if line.decode_rate is not None]
    gaps = [gap for line in lines for gap in line.gaps]
    return Result(
        load=load,
        num_runs=len(runs),
        seconds=statistics.median(run.seconds for run in runs),
        output_rate=statistics.median(run.output_rate for run in runs),
        prompt_rate=statistics.median(run.prompt_rate for run in runs),
        decode_rate=statistics.median(rates) if rates else None,
        first_token=percentiles([line.first_token for line in lines]),
        inter_token=percentiles(gaps) if gaps else None,
        cached_tokens=statistics.median_low(run.cached_tokens for run in runs),
        kv_utilisation=utilisation(slots for run in runs for slots in run.slots),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Of one value or more, linear between neighbours."""
    assert values, "no sample"
    # Python before 3.13 refuses a sample of one.
    sample = values if len(values) > 1 else [values[0]] * 2
    cuts = statistics.quantiles(sample, n=100, method="inclusive")
    return Percentiles(cuts[49], cuts[89], cuts[98])


def utilisation(samples: Iterable[tuple[int, int]]) -> float | None:
    """Live over allocated slots, each sample by its size; None where nothing was ever allocated."""
    pairs = list(samples)
    allocated = sum(allocated for _, allocated in pairs)
    return sum(live for live, _ in pairs) / allocated if allocated else None
