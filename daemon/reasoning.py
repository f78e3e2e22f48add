"""The part of an answer in which a model reasons: its tags, where it begins, and how it is read.

A model's tags are those that its chat template names. Some templates open the section themselves, so that the
answer has its end alone; some close it, so that it is over before the answer begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantd.daemon.scanner import Scanner, Steps, as_reasoning, as_text

Start = Literal["inside", "possible", "over"]

# Text in such marks is quoted: a tag between two of them ends nothing.
_QUOTES = ("`", '"', "'")


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around a model's reasoning. answer: what may stand around the answer after it."""

    opening: str
    closing: str
    answer: tuple[str, str] | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The tags that a template names if its model uses them."""
        return (self.opening, *(self.answer or ()))

    def start(self, prompt: str) -> Start:
        """Where an answer to this prompt begins. possible: it may open a section of its own."""
        end = prompt.rstrip()
        if end.endswith(self.opening):
            return "inside"
        return "over" if end.endswith(self.closing) else "possible"

    def read(self, scanner: Scanner, start: Start) -> Steps[None]:
        """Read the reasoning that an answer begins with, if it does, and the white space around it."""
        if start != "inside":
            space = yield from scanner.space()
            if not (yield from scanner.take(self.opening)):
                scanner.unread(space)
                return
        scanner.in_reasoning = True
        yield from scanner.space()
        yield from self._read_thoughts(scanner)
        scanner.in_reasoning = False
        yield from scanner.space()
        if self.answer is not None and (yield from scanner.take(self.answer[0])):
            yield from scanner.give_words_before(self.answer[1], as_text)

    def _read_thoughts(self, scanner: Scanner) -> Steps[None]:
        scanner.given = ""
        while (space := (yield from scanner.give_words_before(self.closing, as_reasoning))) is not None:
            quote = "" if space else scanner.given
            if quote not in _QUOTES or not (yield from scanner.take(quote)):
                return
            scanner.unread(self.closing + quote)
            yield from scanner.give(len(self.closing), as_reasoning)


REASONING_TAGS = (
    ReasoningTags("<think>", "</think>", ("<response>", "</response>")),
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("Here is my thought process:", "Here is my response:"),
)


def reasoning_tags(template: str) -> ReasoningTags | None:
    """The tags that a chat template names; None: its model does not reason."""
    used = (tags for tags in REASONING_TAGS if all(tag in template for tag in tags.named))
    return next(used, None)
