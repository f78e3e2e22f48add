"""Items of OpenAI's Responses as messages that templates read.

What the assistant reasons, says and calls in a row is one turn. Texts are joined by a newline. Calls of
custom tools are calls with one argument `input`; items of tools that OpenAI's servers run are left out, as
are those tools. Reasoning is read from its content or else its summary; encrypted_content is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from quantd.daemon.response_store import Item, ResponseStore
from quantd.daemon.templates import Message
from quantd.daemon.wire.body import read_arguments
from quantd.daemon.wire.responses_tools import flat_name
from quantd.engine.errors import RequestError

Content: TypeAlias = str | list[dict[str, Any]]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# The field of a part that has its text.
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


class Turns:
    """Messages in the making."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, message: Message) -> None:
        """A message of its own."""
        self.messages.append(message)

    def assistant(self) -> Message:
        """The turn that the assistant is in, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


class _ItemForm(Protocol):
    """A kind of item."""

    def add_to(self, turns: Turns, where: str) -> None:
        """Raises RequestError naming what cannot be read."""


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: Content

    def add_to(self, turns: Turns, where: str) -> None:
        role = _ROLES.get(self.role)
        if role is None:
            names = ", ".join(_ROLES)
            raise RequestError(f"{where}.role: {self.role!r} is not one of {names}", f"{where}.role")
        text = content_text(self.content, f"{where}.content")
        if role != "assistant":
            turns.add({"role": role, "content": text})
            return
        turn = turns.assistant()
        turn["content"] = "\n".join(part for part in (turn["content"], text) if part)


class _Call(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None
    namespace: str | None = None

    def add_to(self, turns: Turns, where: str) -> None:
        name = flat_name(self.namespace, self.name)
        function = {"name": name, "arguments": read_arguments(self.arguments)}
        call = {"id": self.call_id, "type": "function", "function": function}
        turns.assistant().setdefault("tool_calls", []).append(call)


class _CustomCall(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    input: str

    def add_to(self, turns: Turns, where: str) -> None:
        _Call(self.call_id, self.name, {"input": self.input}).add_to(turns, where)


class _CallOutput(msgspec.Struct, frozen=True):
    call_id: str
    output: Content

    def add_to(self, turns: Turns, where: str) -> None:
        text = content_text(self.output, f"{where}.output")
        turns.add({"role": "tool", "tool_call_id": self.call_id, "content": text})


class _Reasoning(msgspec.Struct, frozen=True):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None

    def add_to(self, turns: Turns, where: str) -> None:
        text = content_text(self.content or self.summary or "", where)
        if text:
            turn = turns.assistant()
            before = turn.get("reasoning_content", "")
            turn["reasoning_content"] = "\n".join(part for part in (before, text) if part)


_FORMS: Mapping[str, type[_ItemForm]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _CallOutput,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _CallOutput,
    "reasoning": _Reasoning,
}
_LEFT_OUT = re.compile(r"\w+_call|\w+_call_output|mcp_\w+|tool_search_output")


def content_text(content: Content, where: str) -> str:
    """The text of a content. Raises RequestError naming a part that is none."""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind = str(part.get("type"))
    if kind not in _TEXTS:
        raise RequestError(f"{where}: parts of type {kind!r} are not supported, only text", where)
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{_TEXTS[kind]} must be a string", where)
    return text


def neutral_messages(instructions: str | None, items: Sequence[Item], num_earlier: int) -> list[Message]:
    """The conversation. num_earlier: of its items, those that this request did not bring.

    Raises RequestError.
    """
    turns = Turns()
    if instructions:
        turns.add({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        _add(item, turns, f"input[{i - num_earlier}]")
    return turns.messages


def _add(item: Item, turns: Turns, where: str) -> None:
    form = _FORMS.get(item["type"])
    if form is None:
        if _LEFT_OUT.fullmatch(item["type"]):
            return
        raise RequestError(f"{where}: items of type {item['type']!r} are not supported", where)
    try:
        known = msgspec.convert(item, form)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {error}", where) from None
    known.add_to(turns, where)


_ID_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}


def input_items(given: Content, key: str, store: ResponseStore) -> list[Item]:
    """The input as full items: of a type, with ids made from `key`, references looked up in the store."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_full_item(item, f"{key}_in{i}", store) for i, item in enumerate(items)]


def _full_item(item: Item, key: str, store: ResponseStore) -> Item:
    kind = str(item.get("type") or ("message" if "role" in item else "item_reference"))
    if kind == "item_reference":
        return store.item(str(item.get("id")))
    id = item.get("id") or f"{_ID_PREFIXES.get(kind, 'item')}_{key}"
    if not isinstance(id, str):
        raise RequestError(f"input: the id of an item must be a string, got {id!r}", "input")
    full: Item = {"status": "completed"} | item | {"type": kind, "id": id}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        full["content"] = [{"type": part, "text": item["content"]}]
    return full
