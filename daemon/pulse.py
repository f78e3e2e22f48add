"""Whether a model's engine goes on: one whose steps stand still while requests wait for them is ended."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from quantd.engine.errors import EngineDiedError
from quantd.engine.messages import Stats

_log = logging.getLogger(__name__)

_LOOKS = 4


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
        """How often, not for how long, it stood still is counted: this process may stand still too."""
        between = self._seconds / _LOOKS
        await asyncio.sleep(between)
        steps, num_still, asked = -1, 0, self._ask()
        try:
            while num_still < _LOOKS:
                await asyncio.sleep(between)
                num_still += 1
                if not asked.done():
                    continue
                stats, asked = asked.result(), self._ask()
                if stats is None:
                    return
                if stats.steps != steps or not stats.num_running:
                    steps, num_still = stats.steps, 0
        finally:
            asked.cancel()
        self._end()

    def _ask(self) -> asyncio.Task[Stats | None]:
        return asyncio.create_task(self._stats())

    async def _stats(self) -> Stats | None:
        """None of one that has died."""
        try:
            return await self._engine.stats()
        except EngineDiedError:
            return None

    def _end(self) -> None:
        reason = f"the engine was ended: its steps stood still for {self._seconds:g} s (see --hang-seconds)"
        _log.error("%s: %s", self._name, reason)
        self._ended = True
        self._engine.kill(reason)
