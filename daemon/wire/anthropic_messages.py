"""Anthropic's messages as templates read them.

Results of tools become messages of their own. Turns in a row of one role are one turn, as there; system
messages may stand anywhere, and those at the start join the system prompt. Texts are joined by a newline.
Thinking goes back to the template; redacted thinking, and blocks of tools that Anthropic's servers run,
are left out. A result that is an error says so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from quantd.daemon.templates import Message
from quantd.engine.errors import RequestError

# A line that Claude Code puts before its system prompt. It changes with every request, so that no
# prefix would ever be found again; and no model is meant to read it.
_BILLING_HEADER = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?")


class MessageBody(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]]


@runtime_checkable
class Textual(Protocol):
    """A block that is read as text."""

    def as_text(self, where: str) -> str:
        """Raises RequestError."""


class TextBlock(msgspec.Struct, frozen=True):
    text: str

    def as_text(self, where: str) -> str:
        return self.text


class DocumentSource(msgspec.Struct, frozen=True):
    type: str
    data: str | None = None
    content: str | list[dict[str, Any]] | None = None


class DocumentBlock(msgspec.Struct, frozen=True):
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    def as_text(self, where: str) -> str:
        body = {"text": self.source.data, "content": self.source.content}.get(self.source.type)
        if body is None:
            kind = self.source.type
            raise RequestError(
                f"{where}.source: documents of type {kind!r} are not supported, only text", where
            )
        lines = (self.title, self.context, content_text(body, f"{where}.source.content"))
        return "\n".join(line for line in lines if line)


class SearchResultBlock(msgspec.Struct, frozen=True):
    source: str
    title: str
    content: list[dict[str, Any]]

    def as_text(self, where: str) -> str:
        return "\n".join((self.title, self.source, content_text(self.content, f"{where}.content")))


class ToolReferenceBlock(msgspec.Struct, frozen=True):
    """What a client's search for tools found; all tools are in the prompt anyway."""

    tool_name: str

    def as_text(self, where: str) -> str:
        return self.tool_name


class ThinkingBlock(msgspec.Struct, frozen=True):
    thinking: str


class ToolUseBlock(msgspec.Struct, frozen=True):
    id: str
    name: str
    input: dict[str, Any]

    def neutral(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(msgspec.Struct, frozen=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None

    def neutral(self, where: str) -> Message:
        text = content_text(self.content or "", f"{where}.content")
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": f"Error: {text}" if self.is_error else text,
        }


Block: TypeAlias = (
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)
Place: TypeAlias = tuple[str, Block]

_BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_reference": ToolReferenceBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
_LEFT_OUT = re.compile(r"redacted_thinking|container_upload|\w+_tool_use|\w+_tool_result")


def neutral_messages(
    system: str | list[dict[str, Any]] | None, messages: Sequence[MessageBody]
) -> list[Message]:
    """The conversation. Raises RequestError."""
    if not messages:
        raise RequestError("messages must hold at least one message", "messages")
    for i, body in enumerate(messages):
        if body.role not in _TURNS:
            where = f"messages[{i}].role"
            raise RequestError(f"{where}: {body.role!r} is not one of {', '.join(_TURNS)}", where)
    turns = [] if system is None else [("system", "system", system)]
    turns += [(body.role, f"messages[{i}].content", body.content) for i, body in enumerate(messages)]
    found: list[Message] = []
    for role, group in itertools.groupby(turns, key=lambda turn: turn[0]):
        places = [place for _, where, content in group for place in blocks_of(content, where)]
        found += _TURNS[role](places)
    if not found:
        raise RequestError("messages must hold something to read", "messages")
    return found


def blocks_of(content: str | list[dict[str, Any]], where: str) -> Iterator[Place]:
    """The blocks that a model is to read. Raises RequestError naming one that it cannot."""
    if isinstance(content, str):
        yield where, TextBlock(content)
        return
    if not content:
        raise RequestError(f"{where} must not be empty", where)
    for i, raw in enumerate(content):
        kind = str(raw.get("type"))
        if not _LEFT_OUT.fullmatch(kind):
            yield f"{where}[{i}]", _block(raw, kind, f"{where}[{i}]")


def _block(raw: dict[str, Any], kind: str, where: str) -> Block:
    form = _BLOCKS.get(kind)
    if form is None:
        raise RequestError(f"{where}: blocks of type {kind!r} are not supported", where)
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {error}", where) from None


def content_text(content: str | list[dict[str, Any]], where: str) -> str:
    """The text of a content without calls or thinking. Raises RequestError."""
    return _join(blocks_of(content, where))


def _join(places: Iterable[Place]) -> str:
    return "\n".join(_as_text(block, where) for where, block in places)


def _as_text(block: Block, where: str) -> str:
    if not isinstance(block, Textual):
        raise RequestError(f"{where}: a block of this type has no place here", where)
    return block.as_text(where)


def _system_turn(places: Sequence[Place]) -> Iterator[Message]:
    texts = (_as_text(block, where) for where, block in places)
    kept = [text for text in (_BILLING_HEADER.sub("", text) for text in texts) if text]
    if kept:
        yield {"role": "system", "content": "\n".join(kept)}


def _user_turn(places: Sequence[Place]) -> Iterator[Message]:
    for is_result, group in itertools.groupby(places, lambda place: isinstance(place[1], ToolResultBlock)):
        if is_result:
            yield from (block.neutral(where) for where, block in group if isinstance(block, ToolResultBlock))
        else:
            yield {"role": "user", "content": _join(group)}


def _assistant_turn(places: Sequence[Place]) -> Iterator[Message]:
    blocks = [block for _, block in places]
    thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block.neutral() for block in blocks if isinstance(block, ToolUseBlock)]
    texts = [place for place in places if not isinstance(place[1], ThinkingBlock | ToolUseBlock)]
    message: Message = {"role": "assistant", "content": _join(texts)}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    yield message


_TURNS: Mapping[str, Callable[[Sequence[Place]], Iterator[Message]]] = {
    "system": _system_turn,
    "user": _user_turn,
    "assistant": _assistant_turn,
}
