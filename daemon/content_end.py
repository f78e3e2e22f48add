"""Where an answer's content ends before the model ends it: at a stop string, or by the rules of lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantd.daemon.line_rules import LineLimit
from quantd.daemon.text import StopStrings

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class End:
    """Why an answer ends."""

    reason: Finish
    stop_string: str | None = None


class ContentEnd:
    """One answer's content in, what may go out of it. num_held: characters that may yet be cut off."""

    def __init__(self, stops: StopStrings, lines: LineLimit) -> None:
        self._stops = stops
        self._lines = lines
        self.num_held = 0

    def feed(self, text: str) -> tuple[str, End | None]:
        """The content that is free to go out, and the end if it is reached; then nothing may follow."""
        whole = self.num_held + len(text)
        free, met = self._stops.feed(text)
        free, ends = self._lines.feed(free)
        self.num_held = whole - len(free)
        if ends:
            return free, End("length")
        return free, None if met is None else End("stop", met)

    def release(self) -> str:
        """The content held back, where something else follows it."""
        held, self._stops = self._stops.flush(), self._stops.restarted()
        free, _ = self._lines.feed(held)
        self.num_held = 0
        return free
