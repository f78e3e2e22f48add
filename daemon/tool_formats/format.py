"""What a tool-call format is: how a model writes calls, how they are read and what keeps them right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quantd.daemon.json_schema import enforceable, loosened
from quantd.daemon.output_parser import Piece, ToolCallDelta
from quantd.daemon.scanner import Scanner, Steps
from quantd.daemon.tool_formats.lark import Lark
from quantd.engine.errors import RequestError

MAX_NAME_LEN = 128


_NAME = re.compile(rf"[a-zA-Z0-9_.:/-]{{1,{MAX_NAME_LEN}}}")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. parameters: the JSON schema of its arguments, an object.

    strict: whether the client insists on all of the schema. loose: less of it is asked for, as not all can be
    enforced.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    loose: bool = False

    @property
    def enforced(self) -> dict[str, Any]:
        """The schema that a grammar keeps arguments to; less of it where not all can be kept.

        Raises RequestError for the latter where the client insists on all.
        """
        if self.loose:
            return loosened(self.parameters)
        try:
            return enforceable(self.parameters, "tools")
        except RequestError:
            if self.strict:
                raise
            return loosened(self.parameters)


def read_tools(entries: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The tools of a request, in OpenAI's form. Raises RequestError naming what is wrong with one."""
    tools: dict[str, Tool] = {}
    for i, entry in enumerate(entries):
        where = f"tools[{i}].function"
        tool = _read_tool(entry.get("function"), where)
        if tool.name in tools:
            raise RequestError(f"{where}.name: there are two tools named {tool.name!r}", f"{where}.name")
        tools[tool.name] = tool
    return list(tools.values())


def _read_tool(function: Any, where: str) -> Tool:
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} is missing", where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name must have 1 to {MAX_NAME_LEN} letters, digits or any of _ - . : /, got {name!r}",
            f"{where}.name",
        )
    if parameters is None:
        parameters = {"properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"{where}.parameters must be a JSON schema of type object", f"{where}.parameters")
    for keyword, kind in (("properties", dict), ("required", list)):
        if not isinstance(parameters.get(keyword, kind()), kind):
            field = f"{where}.parameters.{keyword}"
            raise RequestError(f"{field} is not what it has to be in a JSON schema", field)
    return Tool(name, {"type": "object", **parameters}, bool(function.get("strict")))


@dataclass(frozen=True)
class CallRules:
    """What an answer may call. required: it has to call, from the start. parallel: more than once."""

    tools: Sequence[Tool]
    required: bool = False
    parallel: bool = True

    def loosened(self) -> CallRules:
        """The same, with less asked of arguments where no client insists."""
        return replace(self, tools=[replace(tool, loose=not tool.strict) for tool in self.tools])


@dataclass
class Calls:
    """The calls of one answer, numbered as they come. schemas: of the arguments, by the tools' names."""

    schemas: Mapping[str, Mapping[str, Any]]
    new_id: Callable[[], str]
    number: int = field(default=-1, init=False)

    def open(self, name: str) -> Piece:
        """The first piece of the next call."""
        self.number += 1
        return Piece(tool_call=ToolCallDelta(self.number, self.new_id(), name))

    def part(self, arguments: str) -> Piece:
        """The next part of the arguments of the latest call."""
        return Piece(tool_call=ToolCallDelta(self.number, arguments=arguments))


class ToolFormat(Protocol):
    """A way to write tool calls.

    trigger: the text that a call, or a list of calls, begins with. starts_bare: an answer may begin with a
    call that has no trigger. markup: the texts that may hold special tokens.
    """

    @property
    def trigger(self) -> str: ...

    @property
    def starts_bare(self) -> bool: ...

    @property
    def markup(self) -> Sequence[str]: ...

    def read(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        """Read content and calls to the end of an answer."""

    def triggered(self) -> ToolFormat:
        """The same, but that every call has its trigger."""

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, names and arguments, as an answer has them."""

    def grammar(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        """The expression for what follows a trigger to the answer's end. parallel: more than one call."""
