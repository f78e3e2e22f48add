"""Making room in memory: which models go for another one, and how long it waits for them.

Policy alone: knows names, sizes and what runs, and is handed whatever ends models. Never a model goes that is
pinned or that a request holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quantd.daemon.errors import NoRoomError
from quantd.engine.errors import CapacityError

_log = logging.getLogger(__name__)

# What an engine takes beside weights and KV cache: its libraries most of all.
_OVERHEAD = 256 << 20


@dataclass(frozen=True)
class Resident:
    """A model in memory. num_bytes: of its weights and all of its KV cache. on_gpu: where these are.

    used: when a request held it last. wait_idle: returns once none does.
    """

    name: str
    num_bytes: int
    on_gpu: bool
    num_requests: int
    pinned: bool
    used: float
    wait_idle: Callable[[], Coroutine[Any, Any, None]]

    def __str__(self) -> str:
        held = f"{self.num_requests} requests" if self.num_requests != 1 else "1 request"
        state = "pinned" if self.pinned else held if self.num_requests else "idle"
        return f"{self.name} ({self.num_bytes / 1e9:.1f} GB, {state})"


Choose = Callable[[Sequence[Resident]], Sequence[Resident]]
Note = Callable[[str], None]


class Room:
    """Makes room for one model at a time.

    residents: the models in memory. unload: ends some of them. max_models: that may be there, None for any
    number. wait_seconds: how long a model waits for the requests that hold others. note: is told what is
    waited for.
    """

    def __init__(
        self,
        residents: Callable[[], Sequence[Resident]],
        unload: Callable[[str], Awaitable[None]],
        max_models: int | None,
        wait_seconds: float,
    ) -> None:
        self._residents = residents
        self._unload = unload
        self._max_models = max_models
        self._wait_seconds = wait_seconds

    async def take_place(self, note: Note) -> None:
        """Return once there are fewer models than may be. Raises NoRoomError."""
        deadline = time.monotonic() + self._wait_seconds
        while self._max_models is not None and (excess := len(self._residents()) - self._max_models + 1) > 0:
            reason = f"{len(self._residents())} models are in memory, no more may be (max_models)"
            await self._free(partial(first_of, number=excess), None, reason, deadline, note)

    async def make(self, error: CapacityError, note: Note) -> None:
        """Return once models have gone that fill the shortage, or one has. Raises NoRoomError.

        Where that is not urgent, those that are idle go, if they suffice, and nobody is waited for.
        """
        if not error.urgent:
            await self._send_away(leavers(self._idle(error.on_gpu), error.shortage))
            return
        deadline = time.monotonic() + self._wait_seconds
        choose = partial(leavers, shortage=error.shortage)
        await self._free(choose, error.on_gpu, str(error), deadline, note)

    async def _free(
        self, choose: Choose, on_gpu: bool | None, reason: str, deadline: float, note: Note
    ) -> None:
        """Unload those that are chosen of the idle ones; wait until there are some, or one goes by itself."""
        before = len(self._residents())
        while len(self._residents()) == before:
            if going := choose(self._idle(on_gpu)):
                await self._send_away(going)
                return
            loose = self._loose(on_gpu)
            busy = [resident for resident in loose if resident.num_requests]
            left = deadline - time.monotonic()
            if not busy or not choose(loose) or left <= 0:
                raise NoRoomError(self._told(reason, waited=bool(busy) and left <= 0))
            note(f"waits for memory that requests of {', '.join(r.name for r in busy)} hold")
            await _first([resident.wait_idle() for resident in busy], left)

    def _loose(self, on_gpu: bool | None) -> list[Resident]:
        """Those that are not pinned, longest unused first; on_gpu: of these alone, if not None."""
        loose = [r for r in self._residents() if not r.pinned and on_gpu in (None, r.on_gpu)]
        return sorted(loose, key=lambda resident: resident.used)

    def _idle(self, on_gpu: bool | None) -> list[Resident]:
        """Those of them that may go now."""
        return [resident for resident in self._loose(on_gpu) if not resident.num_requests]

    async def _send_away(self, going: Sequence[Resident]) -> None:
        for resident in going:
            _log.info("%s is unloaded to make room", resident.name)
        await asyncio.gather(*(self._unload(resident.name) for resident in going))

    def _told(self, reason: str, waited: bool) -> str:
        there = ", ".join(map(str, self._residents()))
        if not there:
            return reason
        wait = f"; waited {self._wait_seconds:g} s for those in use (memory_wait)" if waited else ""
        return f"{reason}\nIn memory: {there}{wait}"


def first_of(models: Sequence[Resident], number: int) -> Sequence[Resident]:
    """The first so many; none if they are fewer."""
    return models[:number] if len(models) >= number else []


def leavers(models: Sequence[Resident], shortage: int) -> Sequence[Resident]:
    """Those to go for so many bytes, of models in the order of their use; none if all together are too few.

    The first ones that will do, without those that need not go then. A shortage of 0 is one of unknown size:
    the first.
    """
    if shortage <= 0:
        return models[:1]
    going: list[Resident] = []
    while _total(going) < shortage:
        if len(going) == len(models):
            return []
        going.append(models[len(going)])
    for resident in tuple(going):
        others = [other for other in going if other is not resident]
        if _total(others) >= shortage:
            going = others
    return going


def _total(residents: Sequence[Resident]) -> int:
    return sum(resident.num_bytes + _OVERHEAD for resident in residents)


async def _first(waiting: Sequence[Coroutine[Any, Any, None]], seconds: float) -> None:
    """Wait until one of them is over, no longer than so many seconds."""
    tasks = [asyncio.ensure_future(each) for each in waiting]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
