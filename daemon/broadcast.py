"""Frames that come one after another, for any number of readers, each of whom begins where it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable


class Broadcast:
    """All frames so far, and those to come until it is closed."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._is_over = False
        self._changed = asyncio.Event()

    def send(self, frames: Iterable[bytes]) -> None:
        """Add frames."""
        self.frames += frames
        self._wake()

    def close(self) -> None:
        """No more will come."""
        self._is_over = True
        self._wake()

    async def read(self, start: int, silence: float) -> AsyncGenerator[bytes]:
        """The frames from a place on, all that are there at a time; b"" after `silence` seconds of none."""
        while True:
            new, changed = self.frames[start:], self._changed
            if new:
                start += len(new)
                yield b"".join(new)
            elif self._is_over:
                return
            else:
                try:
                    async with asyncio.timeout(silence):
                        await changed.wait()
                except TimeoutError:
                    yield b""

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
