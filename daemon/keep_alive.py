"""How long a model stays in memory once nothing uses it: one timer a model, set when it falls idle.

Several clients share a model, so a request can only lengthen what others asked for. A stay of 0 asks for
the model to go as soon as nothing runs; a request that starts after that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Whoever had a model loaded is on the way to use it.
_UNUSED_SECONDS = 60.0


class Timer(Protocol):
    """What a clock will do."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds, and calls at a time of them, as an event loop has them."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class KeepAlive:
    """The stay of one model, in seconds, infinity for ever.

    seconds: for requests that ask for none of their own. expire: called when the model has been idle for
    its stay, which before the first request is a minute at least. Starts idle.
    """

    def __init__(self, seconds: float, expire: Callable[[], object], clock: Clock) -> None:
        self._seconds = seconds
        self._expire = expire
        self._clock = clock
        self._unasked = clock.time() + max(seconds, _UNUSED_SECONDS)
        self._asked: float | None = None
        self._leaves = False
        self._busy = False
        self._pinned = False
        self._timer: Timer | None = None
        self.start()

    def pin(self, pinned: bool) -> None:
        """Stay for ever, whatever is asked for; or no longer so."""
        self._pinned = pinned
        if not self._busy:
            self.start()

    def ask(self, seconds: float | None = None) -> None:
        """Stay so long from now on, or longer where another asked for that; 0: go when idle."""
        if seconds == 0:
            self._leaves = True
            return
        until = self._clock.time() + (self._seconds if seconds is None else seconds)
        self._asked = until if self._asked is None else max(self._asked, until)

    def stop(self) -> None:
        """Something uses the model from now on."""
        self.close()
        self._busy, self._leaves = True, False

    def start(self) -> None:
        """Nothing uses the model any more."""
        self.close()
        self._busy = False
        when = self._clock.time() if self._leaves else self._until
        if self._pinned:
            return
        if when < float("inf"):
            self._timer = self._clock.call_at(when, self._expire)

    def close(self) -> None:
        """Call nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def seconds_left(self) -> float:
        """How long the model would stay if no more requests came and those that run ended now."""
        if self._pinned:
            return float("inf")
        now = self._clock.time()
        until = max(self._until, now + self._seconds) if self._busy else self._until
        return 0.0 if self._leaves else max(until - now, 0.0)

    @property
    def _until(self) -> float:
        return self._unasked if self._asked is None else self._asked
