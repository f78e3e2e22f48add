"""One answer cut into sections, in order: runs of reasoning, runs of content, tool calls.

Dialects whose answers are lists of blocks or items write one for each section, streamed and whole alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from quantd.daemon.content_end import Finish
from quantd.daemon.deltas import Delta, ScoredToken
from quantd.daemon.generation import Generation

Kind: TypeAlias = Literal["reasoning", "content", "tool_call"]


@dataclass
class Section:
    """A part of one kind; a tool call has an index, an id and a name. tokens: of content, where asked."""

    kind: Kind
    call_index: int | None = None
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it says; of a tool call, the JSON text of its arguments."""
        return "".join(self.parts)


class Addition(NamedTuple):
    """What a delta adds to a section; the section may begin with it, and a call may begin with nothing."""

    section: Section
    part: str
    begins: bool
    tokens: Sequence[ScoredToken] = ()


class Sections:
    """The sections of one choice, from its deltas; and how it ended."""

    def __init__(self) -> None:
        self.all: list[Section] = []
        self.finish_reason: Finish | None = None
        self.stop_string: str | None = None
        self._textless: list[ScoredToken] = []

    def feed(self, delta: Delta) -> Sequence[Addition]:
        """Take a delta in."""
        self.finish_reason, self.stop_string = delta.finish_reason, delta.stop_string
        added = [self._add(Section("reasoning"), delta.reasoning)] if delta.reasoning else []
        if delta.text:
            added.append(self._add(Section("content"), delta.text, self._scored(delta)))
        if (call := delta.tool_call) is not None:
            section = Section("tool_call", call.index, call.id or "", call.name or "")
            added.append(self._add(section, call.arguments))
        self._textless = [] if added else [*self._textless, *delta.tokens]
        return added

    def _scored(self, delta: Delta) -> Sequence[ScoredToken]:
        """The tokens of a delta of content, and those before it whose text was held back."""
        return [token for token in (*self._textless, *delta.tokens) if token.shows]

    def _add(self, section: Section, part: str, tokens: Sequence[ScoredToken] = ()) -> Addition:
        """Add a part to the last section if it is of that kind and call, else to this new one."""
        last = self.all[-1] if self.all else None
        begins = last is None or (last.kind, last.call_index) != (section.kind, section.call_index)
        if begins:
            self.all.append(section)
        self.all[-1].parts.append(part)
        self.all[-1].tokens += tokens
        return Addition(self.all[-1], part, begins, tokens)


async def collect_sections(generation: Generation) -> Sections:
    """The whole answer of a generation with one choice."""
    sections = Sections()
    async for delta in generation:
        sections.feed(delta)
    return sections
