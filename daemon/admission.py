"""How much may be under way: of all clients together, and of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

from quantd.daemon.errors import OverloadedError
from quantd.engine.errors import RequestError


class Admission:
    """Counts answers under way, by client. max_queue, max_client_queue: most of all, and of one client."""

    def __init__(self, max_queue: int, max_client_queue: int | None = None) -> None:
        self.most = min(max_queue, max_client_queue or max_queue)
        self._max_queue = max_queue
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, client: str, count: int, held: ExitStack) -> None:
        """Take in so many answers of a client until `held` is closed.

        Raises OverloadedError, and RequestError for more than ever are.
        """
        if self._closing:
            raise OverloadedError("the daemon is stopping")
        if count > self.most:
            raise RequestError(
                f"n: {count} answers at once are more than this daemon ever takes of a client, which is "
                f"{self.most} (max_queue, max_client_queue)",
                "n",
            )
        self._check(self._total, count, self._max_queue, "of all clients", "max_queue")
        self._check(self._counts[client], count, self.most, "of yours", "max_client_queue")
        self._change(client, count)
        held.callback(self._change, client, -count)

    def refuse_new(self) -> None:
        """Take in no more; what is under way goes on."""
        self._closing = True

    async def wait_idle(self) -> None:
        """Return once nothing is under way."""
        await self._idle.wait()

    def _check(self, under_way: int, more: int, limit: int, whose: str, name: str) -> None:
        if under_way + more > limit:
            raise OverloadedError(
                f"{under_way} requests {whose} are under way and {more} more would pass the limit of {limit} "
                f"({name}); try again later"
            )

    def _change(self, client: str, change: int) -> None:
        self._total += change
        self._counts[client] += change
        if not self._counts[client]:
            del self._counts[client]
        if self._total:
            self._idle.clear()
        else:
            self._idle.set()
