"""How long kernels take as a model runs them: one behind the other, on memory that no cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quantd.engine.cuda_graphs import EAGER_USES

Call = Callable[[], object]
_MIN_CALLS = 8  # of a replay, over which what it costs to begin one is spread
_MAX_COPIES = 64
_REPLAYS = 15
_SETTLES_AFTER = EAGER_USES + 2  # what is compiled and recorded on the way


class Timer(Protocol):
    """Measures calls. recorded: as a CUDA graph, the way decode steps run; else as Python launches them."""

    def seconds(self, calls: Sequence[Call], recorded: bool = True) -> float:
        """Median time of one of `calls`, which do the same to different memory."""

    def wall(self, run: Call) -> float:
        """Median time of something that ends with its result in the CPU's memory, once it has settled."""

    def copies(self, num_bytes: int) -> int:
        """Over how many copies of such memory calls must go round to find none of it in a cache."""


class CudaTimer:
    """By events, over a replay of all calls; as many replays as half a second has room for."""

    def __init__(self) -> None:
        self._cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size

    def copies(self, num_bytes: int) -> int:
        return min(max(-(-3 * self._cache_bytes // num_bytes), 1), _MAX_COPIES)

    def seconds(self, calls: Sequence[Call], recorded: bool = True) -> float:
        rounds = -(-_MIN_CALLS // len(calls)) if recorded else 1
        calls = [*calls] * rounds
        for call in calls:  # compiles
            call()
        torch.cuda.synchronize()
        run = self._record(calls) if recorded else lambda: [call() for call in calls]
        first = self._once(run)
        number = min(max(int(0.5 / max(first, 1e-6)), 3), _REPLAYS)
        return statistics.median(self._once(run) for _ in range(number)) / len(calls)

    def wall(self, run: Call) -> float:
        for _ in range(_SETTLES_AFTER):
            run()
        first = _wall(run)
        number = min(max(int(1 / first), 3), _REPLAYS)
        return statistics.median(_wall(run) for _ in range(number))

    def _record(self, calls: Sequence[Call]) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _once(self, run: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class DryTimer:
    """Runs one call once, for a dry run; what it took says nothing."""

    def copies(self, num_bytes: int) -> int:
        return 2

    def seconds(self, calls: Sequence[Call], recorded: bool = True) -> float:
        return _wall(calls[-1])

    def wall(self, run: Call) -> float:
        return _wall(run)


def _wall(run: Call) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
