"""Ends of an answer that its lines decide: one indented too little, or the time, once a line is done.

Sources: llama-server's n_indent and t_max_predict_ms, which completion in editors uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_BLANKS = " \t"


class LineLimit(Protocol):
    """One answer's text in, what may go out of it."""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may go out, and whether the answer ends with it."""


@dataclass(frozen=True)
class LineRules:
    """min_indent: an answer ends where a line after its first has text behind fewer blanks than this.

    max_seconds: it ends once so much time has passed since its first text and a line is done.
    """

    min_indent: int = 0
    max_seconds: float | None = None

    def limit(self, clock: Callable[[], float] = time.monotonic) -> LineLimit:
        """For one answer."""
        if not self.min_indent and self.max_seconds is None:
            return _NoLimit()
        return _Limit(self, clock)


class _NoLimit:
    def feed(self, text: str) -> tuple[str, bool]:
        return text, False


class _Limit:
    def __init__(self, rules: LineRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._started: float | None = None
        self._has_lines = False
        # Blanks at the head of this line; None behind them, and in the first line.
        self._indent: int | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        if self._started is None and text:
            self._started = self._clock()
        for place, char in enumerate(text):
            if self._dedents(char):
                return text[:place], True
        return text, self._is_late()

    def _dedents(self, char: str) -> bool:
        """Take a character; whether it is the first of a line that is indented too little."""
        if char == "\n":
            self._has_lines, self._indent = True, 0
        elif self._indent is not None and char in _BLANKS:
            self._indent += 1
        elif self._indent is not None:
            indent, self._indent = self._indent, None
            return indent < self._rules.min_indent
        return False

    def _is_late(self) -> bool:
        seconds = self._rules.max_seconds
        if seconds is None or self._started is None or not self._has_lines:
            return False
        return self._clock() - self._started > seconds
