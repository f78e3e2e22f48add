"""Ranks as threads of the test: real groups of gloo, none of the cost of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore

from quantd.engine.parallel import Place, connect
from quantd.engine.split import World

T = TypeVar("T")
CPU = torch.device("cpu")


class RankThreads:
    """A world whose ranks run functions of their place, all at the same time."""

    def __init__(self, world: World, width: int, time_limit: timedelta, pool: ThreadPoolExecutor) -> None:
        self.world = world
        self._pool = pool
        store = HashStore()
        joined = [pool.submit(connect, world, r, store, width, CPU, time_limit) for r in range(world.size)]
        self.places = [future.result() for future in joined]

    def run(self, function: Callable[[int, Place], T]) -> list[T]:
        """The results of function(rank, place), in the order of ranks; raises what the first raised."""
        futures = [self._pool.submit(function, rank, place) for rank, place in enumerate(self.places)]
        return [future.result() for future in futures]


@contextmanager
def rank_threads(world: World, width: int = 8, time_limit: float = 30) -> Iterator[RankThreads]:
    """Connected ranks."""
    with ThreadPoolExecutor(world.size) as pool:
        yield RankThreads(world, width, timedelta(seconds=time_limit), pool)
