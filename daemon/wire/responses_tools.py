"""Tools of OpenAI's Responses, and what calls of them are named.

Functions may stand in namespaces (OpenAI API reference, responses: tools), as Codex sends those of an MCP
server. Templates know none, so the model is told of `namespace__name`, and its calls of that are told apart
again. What a namespace says of itself goes before what its first function does. Other kinds are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from quantd.daemon.wire.body import function_tool
from quantd.engine.errors import RequestError

CallName: TypeAlias = Mapping[str, str]
"""The fields of a call that say of which function it is."""

_SEPARATOR = "__"
_OFFERED = ("function", "namespace")


class ToolBody(msgspec.Struct, frozen=True):
    """A tool. One of type function is the client's own; one of type namespace has such tools."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ToolBody] | None = None

    def echo(self) -> dict[str, Any]:
        """The tool as a response repeats it."""
        told = {"type": self.type, "name": self.name, "description": self.description}
        if self.type == "namespace":
            return told | {"tools": echo_tools(self.tools or ())}
        return told | {"parameters": self.parameters, "strict": self.strict}


@dataclass(frozen=True)
class Function:
    """A function that the model is told of. about: what is to be said of its namespace with it."""

    body: ToolBody
    name: str
    namespace: str | None
    about: str | None

    @property
    def flat_name(self) -> str:
        return flat_name(self.namespace, self.name)

    @property
    def call_name(self) -> CallName:
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})

    def neutral(self) -> dict[str, Any]:
        """The function in OpenAI's form for chats."""
        texts = [text for text in (self.about, self.body.description) if text is not None]
        parameters = self.body.parameters or {"type": "object", "properties": {}}
        return function_tool(
            self.flat_name, "\n\n".join(texts) if texts else None, parameters, self.body.strict
        )


def flat_name(namespace: str | None, name: str) -> str:
    """What the model is told that a function is called. Some of Codex's namespaces end in the separator."""
    return name if namespace is None else f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def functions(tools: Sequence[ToolBody]) -> Iterator[Function]:
    """All that the model is told of. Raises RequestError for one without a name."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.type == "function":
            yield Function(tool, _name(tool, where), None, None)
        elif tool.type == "namespace":
            yield from _namespaced(tool, where)


def _namespaced(tool: ToolBody, where: str) -> Iterator[Function]:
    namespace, about = _name(tool, where), tool.description
    for i, body in enumerate(tool.tools or ()):
        if body.type == "function":
            yield Function(body, _name(body, f"{where}.tools[{i}]"), namespace, about)
            about = None


def _name(tool: ToolBody, where: str) -> str:
    if tool.name is None:
        raise RequestError(f"{where}.name is missing", f"{where}.name")
    return tool.name


def call_names(tools: Sequence[ToolBody]) -> Mapping[str, CallName]:
    """How calls are named, by what the model calls the function."""
    return {function.flat_name: function.call_name for function in functions(tools)}


def echo_tools(tools: Sequence[ToolBody]) -> list[dict[str, Any]]:
    """The tools that are not skipped, as a response repeats them."""
    return [tool.echo() for tool in tools if tool.type in _OFFERED]
