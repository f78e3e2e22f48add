"""A model's raw text split into reasoning, content and tool calls, a piece at a time.

What a parser gives out depends on the text alone, not on where it was cut: the pieces of any split join to
the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ToolCallDelta:
    """The next part of the call with this index. The first part of a call has its id and name.

    arguments: a part of a JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Piece:
    """What a part of the raw text says: one of its fields holds something."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class OutputParser(Protocol):
    """One answer's text in, its pieces out, in order.

    shown: names of special tokens that the parser reads, which would else have no text.
    """

    @property
    def shown(self) -> frozenset[str]: ...

    def feed(self, text: str) -> Sequence[Piece]:
        """What is settled once `text` is known."""

    def flush(self) -> Sequence[Piece]:
        """The rest, when no more comes."""


class PlainOutput:
    """All text is content."""

    shown: frozenset[str] = frozenset()

    def feed(self, text: str) -> Sequence[Piece]:
        return (Piece(text),) if text else ()

    def flush(self) -> Sequence[Piece]:
        return ()
