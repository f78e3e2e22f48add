"""Waiting for what a test has set going, on a machine that may be slow, busy, or still for some seconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

PATIENCE = 60.0
"""Seconds within which anything happens that is to happen, on any machine."""

_MOST_SECONDS = 0.02

T = TypeVar("T")


def until(condition: Callable[[], object], what: str = "what was waited for") -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.01)


async def until_so(condition: Callable[[], object]) -> None:
    """As `until`, in a loop: what is waited for may go on in it."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def run_steadily(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in a SteadyLoop, for two of `PATIENCE` at most."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(asyncio.wait_for(main, 2 * PATIENCE))


class SteadyLoop(asyncio.SelectorEventLoop):
    """A loop whose clock goes on while it waits or works, and not while the machine gives it no time to.

    So what runs in it keeps the order that its delays and limits give it, however small these are.
    """

    def __init__(self) -> None:
        self._waits = _Waits()
        super().__init__(self._waits)

    def time(self) -> float:
        """Seconds since some moment, without those that were lost."""
        return self._waits.time()


class _Waits(selectors.DefaultSelector):
    """Tells the time that it was to wait from the time that it took."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = time.monotonic()
        self._lost = 0.0

    def time(self) -> float:
        return self._count(_MOST_SECONDS)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._count(_MOST_SECONDS)
        found = super().select(timeout)
        if timeout is not None:
            self._count(max(timeout, 0.0) + _MOST_SECONDS)
        return found

    def _count(self, most: float) -> float:
        """The clock. Of what has passed since it was last looked at, more than so much is lost."""
        now = time.monotonic()
        self._lost += max(now - self._counted - most, 0.0)
        self._counted = now
        return now - self._lost
