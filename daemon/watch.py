"""Looks after the daemon while a service manager does: its status, its watchdog, its end when unused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quantd.daemon.supervision import Notifier
from quantd.engine.messages import Stats

_LOOK_SECONDS = 30.0


class Entry(Protocol):
    """A model in memory, or on its way: None."""

    @property
    def model(self) -> object | None: ...


class Watched(Protocol):
    """What is looked at. stats: of the engines that answer, by model."""

    @property
    def entries(self) -> Sequence[Entry]: ...

    async def stats(self) -> Mapping[str, Stats]: ...


class Watch:
    """Looks every so often. idle_exit: seconds without a model in memory after which `stop` is called.

    The watchdog hears of the daemon only while its event loop and all its engines go on, which answer
    between two of their steps.
    """

    def __init__(
        self,
        watched: Watched,
        notifier: Notifier,
        watchdog_seconds: float | None,
        idle_exit: float | None,
        stop: Callable[[], object],
    ) -> None:
        self._watched = watched
        self._notifier = notifier
        self._idle_exit = math.inf if idle_exit is None else idle_exit
        self._stop = stop
        self.seconds = min(_LOOK_SECONDS, self._idle_exit / 3, (watchdog_seconds or math.inf) / 3)
        self._unused = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self.seconds)
            self._unused += self.seconds

    async def look(self) -> None:
        """Look once."""
        stats = await self._watched.stats()
        entries = self._watched.entries
        if len(stats) >= sum(entry.model is not None for entry in entries):
            self._notifier.alive()
        self._notifier.status(status_line(len(entries), stats))
        if entries:
            self._unused = 0.0
        elif self._unused >= self._idle_exit:
            self._stop()


def status_line(num_models: int, stats: Mapping[str, Stats]) -> str:
    """Such as "smollm2: 2 running, 1 waiting"."""
    lines = [
        f"{name}: {numbers.num_running} running, {numbers.num_waiting} waiting"
        for name, numbers in stats.items()
    ]
    silent = num_models - len(stats)
    if silent > 0:
        lines.append(f"{silent} loading or in a long step")
    return "; ".join(lines) or "no model in memory"
