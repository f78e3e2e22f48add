"""Work that goes on without the client that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from quantd.daemon.activity import hold_current
from quantd.daemon.broadcast import Broadcast


class Background:
    """Running work by id, and what it tells. What it raises is its own affair: it has no one to tell."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, Broadcast] = {}

    def start(self, id: str, work: Coroutine[Any, Any, None], told: Broadcast) -> None:
        """Run it. told: is closed at its end."""
        task = asyncio.create_task(work)
        self._tasks[id], self._told[id] = task, told
        release = hold_current()
        task.add_done_callback(lambda _: release())
        task.add_done_callback(lambda _: self._end(id))

    def told(self, id: str) -> Broadcast | None:
        """What running work tells."""
        return self._told.get(id)

    async def cancel(self, id: str) -> bool:
        """End it; False where it is over by itself."""
        task = self._tasks.get(id)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    def _end(self, id: str) -> None:
        del self._tasks[id]
        self._told.pop(id).close()

    async def close(self) -> None:
        """End all."""
        for id in list(self._tasks):
            await self.cancel(id)
