"""When a step's events go out: at once, or, where steps are short, a few together.

Every frame wakes the daemon and its client, which then compute where the engine would. So while tokens
come faster than any reader could tell, some wait for the next step; none waits more than a few milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quantd.engine.messages import Events, FromEngine
from quantd.engine.plan import Plan
from quantd.engine.request import TokenEvent

HOLD_SECONDS = 0.005


class Outbox:
    """Sends events, as a rule not twice within `hold_seconds`. clock: seconds."""

    def __init__(
        self,
        send: Callable[[FromEngine], None],
        hold_seconds: float = HOLD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._held: list[TokenEvent] = []
        self._sent_at = -hold_seconds

    def add(self, events: Sequence[TokenEvent]) -> None:
        """Send them, or hold them where others went out a moment ago and no request ends with these."""
        self._held += events
        ends = any(event.finish_reason is not None for event in events)
        if ends or self._clock() - self._sent_at >= self._hold_seconds:
            self.flush()

    def before(self, plan: Plan) -> None:
        """Send what is held before a step that computes more than a token of some request: it takes long."""
        if plan.num_tokens > len(plan.entries):
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        if not self._held:
            return
        held, self._held = self._held, []
        self._sent_at = self._clock()
        self._send(Events(held))
