"""A clock that goes when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class FakeTimer:
    when: float
    callback: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeClock:
    now: float = 1000.0
    timers: list[FakeTimer] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> FakeTimer:
        timer = FakeTimer(when, callback)
        self.timers.append(timer)
        return timer

    def pass_time(self, seconds: float) -> None:
        """Let time pass and run what is due."""
        self.now += seconds
        due = [timer for timer in self.timers if timer.when <= self.now]
        self.timers = [timer for timer in self.timers if timer.when > self.now and not timer.cancelled]
        for timer in due:
            if not timer.cancelled:
                timer.callback()

    @property
    def num_timers(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)
