"""The sleep of the machine, before which GPUs are let go of: loads wait for its end."""

from __future__ import annotations

import asyncio

_LONGEST_SECONDS = 60.0
"""The end may never be told. The clock that counts this stands still in a sleep."""


class Sleep:
    """Whether the machine is about to sleep, or sleeps."""

    def __init__(self) -> None:
        self._awake = asyncio.Event()
        self._awake.set()
        self._waking: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on `over` waits, but not for long."""
        self.end()
        self._awake.clear()
        self._waking = asyncio.get_running_loop().call_later(_LONGEST_SECONDS, self.end)

    def end(self) -> None:
        """The machine is awake."""
        if self._waking is not None:
            self._waking.cancel()
        self._awake.set()

    async def over(self) -> None:
        """Return once the machine is awake."""
        await self._awake.wait()
