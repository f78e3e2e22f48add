"""A model's raw text split into reasoning, content and tool calls, a piece at a time.

What a parser gives out depends on the text alone, not on where it was cut: the pieces of any split join to
the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    shown: names of special tokens that the parser reads, which would else have no text. in_reasoning:
    whether the text so far ends in reasoning.
    """

    @property
    def shown(self) -> frozenset[str]: ...

    @property
    def in_reasoning(self) -> bool: ...

    def feed(self, text: str) -> Sequence[Piece]:
        """What is settled once `text` is known."""

    def flush(self) -> Sequence[Piece]:
        """The rest, when no more comes."""


class PlainOutput:
    """All text is content."""

    shown: frozenset[str] = frozenset()
    in_reasoning = False

    def feed(self, text: str) -> Sequence[Piece]:
        return (Piece(text),) if text else ()

    def flush(self) -> Sequence[Piece]:
        return ()


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that say something, neighbours of one kind made one, a call's with that call's."""
    result: list[Piece] = []
    for piece in pieces:
        whole = _join(result[-1], piece) if result else None
        if whole is not None:
            result[-1] = whole
        elif piece != Piece():
            result.append(piece)
    return result


def _join(first: Piece, second: Piece) -> Piece | None:
    """Both as one; None where they are of two kinds, or the second begins a call."""
    if first.text and second.text:
        return Piece(text=first.text + second.text)
    if first.reasoning and second.reasoning:
        return Piece(reasoning=first.reasoning + second.reasoning)
    call, part = first.tool_call, second.tool_call
    if call is not None and part is not None and call.index == part.index:
        return Piece(tool_call=replace(call, arguments=call.arguments + part.arguments))
    return None
