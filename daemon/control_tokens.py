"""Messages that spell a model's control tokens: marked, so that what is spelled stays text.

A template joins its own control tokens and the texts of the messages into one prompt. Before that, a mark
goes before each control token that a text spells; marks go through whatever a template does with texts, and
the prompt tells by them which of its tokens are only spelled. A mark that a template loses leaves a token
that is read as if the template had written it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

# A noncharacter (Unicode 16.0, section 23.7): no text for interchange has one. One that is there all the
# same is doubled.
MARK = "\ufdd0"
_MARKS = re.compile(f"{MARK}({MARK}?)")


class ControlTokens:
    """The control tokens of a tokenizer, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {MARK, *names}
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        self._first = re.compile(f"[{re.escape(''.join({name[0] for name in self._names}))}]")

    def mark(self, value: Any) -> Any:
        """A text, list or dict with a mark before each control token that it spells."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        places = list(self._places(text))
        if not places:
            return text
        parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
        return MARK.join(parts)

    def _places(self, text: str) -> Iterator[int]:
        """Where control tokens begin: from the left, the longest first."""
        end = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start >= end and (length := self._length(text, start)):
                end = start + length
                yield start

    def _length(self, text: str, start: int) -> int:
        """The length of the control token that begins here, or 0."""
        return next((size for size in self._lengths if text[start : start + size] in self._names), 0)


def unmark(text: str) -> tuple[str, frozenset[int]]:
    """A text without its marks, and the places of what they stood before."""
    parts: list[str] = []
    places, length, end = set(), 0, 0
    for match in _MARKS.finditer(text):
        parts += (text[end : match.start()], match[1])
        length += match.start() - end
        end = match.end()
        if match[1]:
            length += 1
        else:
            places.add(length)
    return "".join([*parts, text[end:]]), frozenset(places)
