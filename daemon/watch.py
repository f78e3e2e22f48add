"""Looks after the daemon while a service manager does: its status, its watchdog, its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quantd.daemon.supervision import Notifier
from quantd.engine.messages import Stats

_LOOK_SECONDS = 30.0
_TELL_SECONDS = 5.0


class Entry(Protocol):
    """A model in memory, or on its way: None."""

    @property
    def model(self) -> object | None: ...


class Watched(Protocol):
    """What is looked at. stats: of the engines that answer, by model. stuck: hang and cannot be ended."""

    @property
    def entries(self) -> Sequence[Entry]: ...

    @property
    def stuck(self) -> Sequence[str]: ...

    async def stats(self) -> Mapping[str, Stats]: ...


class Watch:
    """Looks every so often.

    idle_exit: seconds without a model in memory or a request (is_busy) after which `stop` is called. The
    watchdog hears of the daemon while its event loop goes on and what hangs of its engines is ended (see
    Pulse).
    """

    def __init__(
        self,
        watched: Watched,
        notifier: Notifier,
        watchdog_seconds: float | None,
        idle_exit: float | None,
        stop: Callable[[], object],
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._watched = watched
        self._notifier = notifier
        self._idle_exit = math.inf if idle_exit is None else idle_exit
        self._stop = stop
        self._is_busy = is_busy
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
        if not self._watched.stuck:
            self._notifier.alive()
        self._notifier.status(status_line(len(entries), stats))
        if entries or self._is_busy():
            self._unused = 0.0
        elif self._unused >= self._idle_exit:
            self._stop()


async def tell_end(notifier: Notifier, drain_seconds: float, close_seconds: float) -> None:
    """Tell a manager until cancelled how much longer a stop takes: requests may end, then engines do.

    Time is asked for piecemeal, so that a daemon that hangs in its end is not waited for.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + drain_seconds
    notifier.stopping()
    while True:
        left = max(end - clock(), 0.0)
        notifier.alive()
        notifier.extend(min(left, _TELL_SECONDS) + close_seconds)
        notifier.status(f"ending; requests may run for another {left:.0f} s")
        await asyncio.sleep(_TELL_SECONDS)


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
