"""What OpenAI's chat requests say of tools and of reasoning (OpenAI API reference, chat/completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quantd.daemon.requests import ToolChoice
from quantd.engine.errors import RequestError

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Named(msgspec.Struct, frozen=True):
    name: str


class FunctionChoice(msgspec.Struct, frozen=True, tag="function"):
    """One function, by name."""

    function: Named


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class AllowedChoice(msgspec.Struct, frozen=True, tag="allowed_tools"):
    """Some of the tools."""

    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


def tool_choice(choice: Choice | None) -> ToolChoice:
    """The neutral choice."""
    match choice:
        case FunctionChoice(function):
            return ToolChoice("required", function.name)
        case AllowedChoice(allowed):
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(allowed.mode, allowed=names)
        case None:
            return ToolChoice()
    return ToolChoice(choice)


def functions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each a function. Raises RequestError for tools of other types."""
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if kind != "function":
            raise RequestError(
                f"tools[{i}].type: {kind!r} is not supported, only function", f"tools[{i}].type"
            )
    return [{"type": "function", **tool} for tool in tools]
