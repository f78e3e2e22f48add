"""Whether a model's engine goes on: one whose steps stand still while requests wait for them is ended."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from quantd.engine.errors import EngineDiedError
from quantd.engine.messages import Stats

_log = logging.getLogger(__name__)


class Beating(Protocol):
    """An engine. It tells its counters between two steps."""

    @property
    def died(self) -> asyncio.Future[str]: ...

    async def stats(self) -> Stats: ...

    def kill(self, reason: str) -> None: ...


class Pulse:
    """Looks at an engine between `start` and `stop`, while requests hold it; at an idle one nobody looks.

    seconds: the longest that a step may take. The requests of an engine that is ended fail with the reason.
    """

    def __init__(self, name: str, engine: Beating, seconds: float) -> None:
        self._name = name
        self._engine = engine
        self._seconds = seconds
        self._looking: asyncio.Task[None] | None = None
        self._ended = False

    @property
    def is_stuck(self) -> bool:
        """Whether the engine is still there though it was ended."""
        return self._ended and not self._engine.died.done()

    def start(self) -> None:
        """Requests hold the engine from now on."""
        if self._looking is None and self._seconds > 0:
            self._looking = asyncio.create_task(self._look())

    def stop(self) -> None:
        """None does any more."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        clock, steps, since = asyncio.get_running_loop().time, -1, 0.0
        while True:
            await asyncio.sleep(self._seconds / 4)
            try:
                async with asyncio.timeout(self._seconds):
                    stats = await self._engine.stats()
            except EngineDiedError:
                return
            except TimeoutError:
                self._end()
                return
            if stats.steps != steps or not stats.num_running:
                steps, since = stats.steps, clock()
            elif clock() - since >= self._seconds:
                self._end()
                return

    def _end(self) -> None:
        reason = f"the engine was ended: its steps stood still for {self._seconds:g} s (see --hang-seconds)"
        _log.error("%s: %s", self._name, reason)
        self._ended = True
        self._engine.kill(reason)
