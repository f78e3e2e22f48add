"""Sections of an answer as items of OpenAI's Responses, and the events that tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from quantd.daemon.deltas import ScoredToken
from quantd.daemon.response_store import Item
from quantd.daemon.sections import Kind, Section
from quantd.daemon.wire.openai import scored_entries
from quantd.daemon.wire.responses_tools import CallName

Event: TypeAlias = tuple[str, dict[str, Any]]
"""The type of an event and its own fields."""

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ItemForm(Protocol):
    """How a section is told. prefix: of the item's id. content None: the item has just begun."""

    @property
    def prefix(self) -> str: ...

    def item(self, section: Section, content: str | None) -> Item: ...

    def opening(self) -> Sequence[Event]:
        """The events between the item's own and its first delta."""

    def delta(self, part: str, tokens: Sequence[ScoredToken]) -> Event: ...

    def closing(self, section: Section) -> Sequence[Event]:
        """The events between its last delta and the item's own."""


@dataclass(frozen=True)
class _Part:
    """A text in an item. kind: the part's type. index: what its place is called. text, part: its events.

    scored: whether it has log probabilities.
    """

    kind: str
    index: str
    text: str
    part: str
    scored: bool = False

    def whole(self, text: str, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        annotations: dict[str, Any] = {"annotations": []} if self.scored else {}
        return {"type": self.kind, "text": text} | annotations | self._logprobs(tokens)

    def opening(self) -> Sequence[Event]:
        return ((f"{self.part}.added", {self.index: 0, "part": self.whole("", ())}),)

    def delta(self, part: str, tokens: Sequence[ScoredToken]) -> Event:
        return f"{self.text}.delta", {self.index: 0, "delta": part} | self._logprobs(tokens)

    def closing(self, section: Section) -> Sequence[Event]:
        text, tokens = section.text, section.tokens
        return (
            (f"{self.text}.done", {self.index: 0, "text": text} | self._logprobs(tokens)),
            (f"{self.part}.done", {self.index: 0, "part": self.whole(text, tokens)}),
        )

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        return {"logprobs": scored_entries(tokens)} if self.scored else {}


_OUTPUT = _Part("output_text", "content_index", "response.output_text", "response.content_part", scored=True)
_REASONING = _Part("reasoning_text", "content_index", "response.reasoning_text", "response.content_part")
_SUMMARY = _Part(
    "summary_text",
    "summary_index",
    "response.reasoning_summary_text",
    "response.reasoning_summary_part",
)


@dataclass(frozen=True)
class _TextForm:
    """An item with one text. field: where that is; fields: what else the item holds."""

    prefix: str
    field: str
    text: _Part
    fields: Mapping[str, Any]

    def item(self, section: Section, content: str | None) -> Item:
        parts = [] if content is None else [self.text.whole(content, section.tokens)]
        return dict(self.fields) | {self.field: parts}

    def opening(self) -> Sequence[Event]:
        return self.text.opening()

    def delta(self, part: str, tokens: Sequence[ScoredToken]) -> Event:
        return self.text.delta(part, tokens)

    def closing(self, section: Section) -> Sequence[Event]:
        return self.text.closing(section)


@dataclass(frozen=True)
class _CallForm:
    """names: how calls are named, by what the model calls the function."""

    names: Mapping[str, CallName]
    prefix: str = "fc"

    def item(self, section: Section, content: str | None) -> Item:
        name = self.names.get(section.name, {"name": section.name})
        call = {"type": "function_call", "call_id": section.call_id, **name}
        return call | {"arguments": content or ""}

    def opening(self) -> Sequence[Event]:
        return ()

    def delta(self, part: str, tokens: Sequence[ScoredToken]) -> Event:
        return "response.function_call_arguments.delta", {"delta": part}

    def closing(self, section: Section) -> Sequence[Event]:
        return (("response.function_call_arguments.done", {"arguments": section.text}),)


_MESSAGE = _TextForm("msg", "content", _OUTPUT, {"type": "message", "role": "assistant"})
_REASONING_ITEM: Item = {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}


def item_forms(summarizes: bool, names: Mapping[str, CallName]) -> Mapping[Kind, ItemForm]:
    """The form of each kind of section.

    summarizes: reasoning is told as its own summary. names: how calls are named, by what the model calls the
    function.
    """
    field, text = ("summary", _SUMMARY) if summarizes else ("content", _REASONING)
    reasoning = _TextForm("rs", field, text, _REASONING_ITEM)
    return {"content": _MESSAGE, "reasoning": reasoning, "tool_call": _CallForm(names)}
