"""Ollama's messages as templates read them. Its clients often leave out which call a tool's answer is to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quantd.daemon.templates import Message
from quantd.daemon.wire.body import read_arguments
from quantd.engine.errors import RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class FunctionBody(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | str | None = None


class CallBody(msgspec.Struct, frozen=True):
    function: FunctionBody
    id: str | None = None


class MessageBody(msgspec.Struct, frozen=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[CallBody] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def neutral_messages(bodies: Sequence[MessageBody]) -> list[Message]:
    """The messages, each call with an id and each answer of a tool with that of its call.

    Raises RequestError naming a role that there is not, or an image.
    """
    calls = _Calls()
    return [_message(body, f"messages[{place}]", calls) for place, body in enumerate(bodies)]


def _message(body: MessageBody, where: str, calls: _Calls) -> Message:
    role = _ROLES.get(body.role.lower())
    if role is None:
        raise RequestError(f"{where}.role: {body.role!r} is not one of {', '.join(_ROLES)}", f"{where}.role")
    refuse_images(body.images, f"{where}.images")
    message: Message = {"role": role, "content": body.content or ""}
    if body.thinking:
        message["reasoning_content"] = body.thinking
    if body.tool_calls:
        message["tool_calls"] = calls.made(body.tool_calls)
    if role == "tool":
        message |= calls.answered(body)
    return message


def refuse_images(images: Sequence[object] | None, where: str) -> None:
    """Raise RequestError where there is an image."""
    if images:
        raise RequestError(f"{where}: images are not supported, only text", where)


class _Calls:
    """The calls of a conversation that no tool has answered yet, as (id, name), oldest first."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._count = 0

    def made(self, bodies: Sequence[CallBody]) -> list[dict[str, Any]]:
        """Calls as templates read them."""
        return [self._made(body) for body in bodies]

    def _made(self, body: CallBody) -> dict[str, Any]:
        # Nine letters and digits, which Mistral's templates insist on.
        call_id = body.id or f"call{self._count:05d}"
        self._count += 1
        self._open.append((call_id, body.function.name))
        function = {"name": body.function.name, "arguments": read_arguments(body.function.arguments)}
        return {"type": "function", "id": call_id, "function": function}

    def answered(self, body: MessageBody) -> Message:
        """Which call a tool's message answers: by its id, else by its name, else the oldest open one."""
        found = self._find(body)
        if found is not None:
            self._open.remove(found)
        call_id, name = found or (body.tool_call_id, body.tool_name)
        fields = {"tool_call_id": call_id, "name": body.tool_name or name}
        return {key: value for key, value in fields.items() if value}

    def _find(self, body: MessageBody) -> tuple[str, str] | None:
        if body.tool_call_id:
            return next((call for call in self._open if call[0] == body.tool_call_id), None)
        named = [call for call in self._open if call[1] == body.tool_name]
        return next(iter(named or self._open), None)
