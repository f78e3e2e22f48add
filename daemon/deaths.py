"""How often engines end by themselves: one that does so again and again is not started any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quantd.daemon.errors import EngineStoppedError

MOST_DEATHS = 3
WINDOW_SECONDS = 60.0


@dataclass
class _Record:
    """A model's latest deaths, by the clock. stopped: why it is not started again."""

    times: list[float] = field(default_factory=list)
    stopped: str | None = None


class Deaths:
    """The deaths of all engines by their model's name. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def note(self, name: str, reason: str) -> None:
        """An engine of this model has ended by itself."""
        record, now = self._records.setdefault(name, _Record()), self._clock()
        record.times = [time for time in record.times if now - time < WINDOW_SECONDS] + [now]
        if len(record.times) >= MOST_DEATHS:
            record.stopped = reason

    def check(self, name: str) -> None:
        """Raise EngineStoppedError where the engine of this model must not be started by itself."""
        reason = self.stopped.get(name)
        if reason is not None:
            raise EngineStoppedError(
                f"{name} is not started again, since its engine died {MOST_DEATHS} times within "
                f"{WINDOW_SECONDS:.0f} s, last of this: {reason}. The daemon's log tells more; once the "
                f"cause is gone: quantd load {name}"
            )

    def clear(self, name: str) -> None:
        """Forget the deaths of a model: somebody wants it started all the same."""
        self._records.pop(name, None)

    @property
    def stopped(self) -> dict[str, str]:
        """The models that are not started any more, with the reason of the last death."""
        return {name: record.stopped for name, record in self._records.items() if record.stopped is not None}
