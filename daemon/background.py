"""Work that goes on without the client that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Running work by id. What it raises is its own affair: it has no one to tell."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run it."""
        task = asyncio.create_task(work)
        self._tasks[id] = task
        task.add_done_callback(lambda _: self._tasks.pop(id, None))

    async def cancel(self, id: str) -> bool:
        """End it; False where it is over by itself."""
        task = self._tasks.get(id)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    async def close(self) -> None:
        """End all."""
        for id in list(self._tasks):
            await self.cancel(id)
