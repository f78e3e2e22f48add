"""Text that comes in parts, for readers that need not know where the parts end.

A reader is a generator over a Scanner: it yields pieces of the answer, and None where it needs more text.
What it does depends only on text that is there in whole, so any split of a text gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from quantd.daemon.output_parser import Piece

Result = TypeVar("Result")
Steps: TypeAlias = Generator[Piece | None, None, Result]


class Scanner:
    """Text that is not read yet.

    given: the last character given out. closed: no more comes. in_reasoning: for readers to tell.
    """

    def __init__(self) -> None:
        self.text = ""
        self.given = ""
        self.closed = False
        self.in_reasoning = False

    def skip(self, size: int) -> str:
        """Read so many characters of the text that is there."""
        head, self.text = self.text[:size], self.text[size:]
        return head

    def unread(self, text: str) -> None:
        """Put back what was read last."""
        self.text = text + self.text

    def more(self) -> Steps[bool]:
        """Wait for more text; False where none comes."""
        if self.closed:
            return False
        yield None
        return True

    def take(self, literal: str) -> Steps[bool]:
        """Read this if the text begins with it."""
        while len(self.text) < len(literal) and literal.startswith(self.text):
            if not (yield from self.more()):
                return False
        met = self.text.startswith(literal)
        self.skip(len(literal) if met else 0)
        return met

    def space(self) -> Steps[str]:
        """Read white space."""
        space = ""
        while True:
            space += self.skip(len(self.text) - len(self.text.lstrip()))
            if self.text or not (yield from self.more()):
                return space

    def until(self, mark: str, limit: int | None = None) -> Steps[str | None]:
        """Read a mark and what is before it. None, and nothing read, where it does not come or is too far.

        limit: the most characters before the mark.
        """
        while (place := self.text.find(mark)) < 0:
            too_far = limit is not None and len(self.text) >= limit + len(mark)
            if too_far or not (yield from self.more()):
                return None
        if limit is not None and place > limit:
            return None
        head = self.skip(place)
        self.skip(len(mark))
        return head

    def give(self, size: int, piece: Callable[[str], Piece]) -> Steps[None]:
        """Give out so many characters of the text that is there."""
        if size:
            text = self.skip(size)
            self.given = text[-1]
            yield piece(text)

    def give_before(self, mark: str, piece: Callable[[str], Piece]) -> Steps[bool]:
        """Give out what is before a mark, and read the mark. False: the text ended without it."""
        while (place := self.text.find(mark)) < 0:
            yield from self.give(len(self.text) - _partial(self.text, mark), piece)
            if not (yield from self.more()):
                yield from self.give(len(self.text), piece)
                return False
        yield from self.give(place, piece)
        self.skip(len(mark))
        return True

    def give_words_before(self, mark: str, piece: Callable[[str], Piece]) -> Steps[str | None]:
        """Give out what is before a mark, but for white space right before it, and read the mark.

        Returns that white space; None where the text ended without the mark.
        """
        while (place := self.text.find(mark)) < 0:
            head = self.text[: len(self.text) - _partial(self.text, mark)]
            yield from self.give(len(head.rstrip()), piece)
            if not (yield from self.more()):
                yield from self.give(len(self.text), piece)
                return None
        yield from self.give(len(self.text[:place].rstrip()), piece)
        space = self.skip(self.text.find(mark))
        self.skip(len(mark))
        return space


def _partial(text: str, mark: str) -> int:
    """The length of the end of a text with which a mark begins that is not all there."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


def as_text(text: str) -> Piece:
    """A piece of content."""
    return Piece(text=text)


def as_reasoning(text: str) -> Piece:
    """A piece of reasoning."""
    return Piece(reasoning=text)


def read_content(scanner: Scanner) -> Steps[None]:
    """All text is content."""
    while scanner.text or (yield from scanner.more()):
        yield from scanner.give(len(scanner.text), as_text)


class ReadOutput:
    """An output parser (see OutputParser) that runs a reader."""

    def __init__(self, reader: Callable[[Scanner], Steps[None]], shown: frozenset[str]) -> None:
        self.shown = shown
        self._scanner = Scanner()
        self._steps = reader(self._scanner)

    @property
    def in_reasoning(self) -> bool:
        return self._scanner.in_reasoning

    def feed(self, text: str) -> Sequence[Piece]:
        self._scanner.text += text
        return self._run()

    def flush(self) -> Sequence[Piece]:
        self._scanner.closed = True
        return self._run()

    def _run(self) -> Sequence[Piece]:
        pieces = []
        while (piece := next(self._steps, None)) is not None:
            pieces.append(piece)
        return pieces
