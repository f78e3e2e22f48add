"""Calls whose arguments stand in tags, one parameter each, as Qwen-coder and Seed write them.

Values are bare text: the tool's schema says which of them are strings and which JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from quantd.daemon.constraints import quoted
from quantd.daemon.scanner import Scanner, Steps, as_text
from quantd.daemon.tool_formats.format import MAX_NAME_LEN, Calls, Tool
from quantd.daemon.tool_formats.lark import Lark
from quantd.daemon.tool_formats.schemas import json_type, listed, types_of
from quantd.engine.errors import RequestError

_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.-]*/"


@dataclass(frozen=True)
class XmlCalls:
    """The texts are: trigger head name head_end, then for each parameter parameter key key_end value
    value_end, then after. again stands between two calls, and holds the trigger.
    """

    trigger: str
    head: str
    head_end: str
    parameter: str
    key_end: str
    value_end: str
    after: str
    again: str
    starts_bare: ClassVar[bool] = False

    @property
    def markup(self) -> Sequence[str]:
        return [getattr(self, part.name) for part in fields(self)]

    def read(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        while (space := (yield from scanner.give_words_before(self.trigger, as_text))) is not None:
            if not (yield from self._read_call(scanner, calls)):
                yield as_text(space + self.trigger)

    def _read_call(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        """Read what follows a trigger. False, and nothing read, where it is no call."""
        if not (yield from scanner.take(self.head)):
            return False
        name = yield from scanner.until(self.head_end, limit=MAX_NAME_LEN)
        if name is None:
            scanner.unread(self.head)
            return False
        yield calls.open(name)
        yield calls.part("{")
        yield from self._read_parameters(scanner, calls, calls.schemas.get(name, {}))
        ended = yield from scanner.take(self.after)
        if ended or not scanner.closed:
            yield calls.part("}")
        yield from scanner.space()
        return True

    def _read_parameters(self, scanner: Scanner, calls: Calls, schema: Mapping[str, Any]) -> Steps[None]:
        comma = ""
        while (yield from scanner.take(self.parameter)):
            key = yield from scanner.until(self.key_end)
            if key is None:
                return
            yield calls.part(f"{comma}{_json(key)}: ")
            comma = ", "
            types = types_of(schema.get("properties", {}).get(key, {}), schema)
            if types == {"string"}:
                yield calls.part('"')
                ended = yield from scanner.give_before(
                    self.value_end, lambda text: calls.part(_escaped(text))
                )
                if not ended:
                    return
                yield calls.part('"')
            else:
                value = yield from scanner.until(self.value_end)
                if value is None:
                    return
                yield calls.part(_as_json(value, types))

    def triggered(self) -> XmlCalls:
        return self

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        texts = []
        for name, arguments in calls:
            values = [
                f"{self.parameter}{key}{self.key_end}{value if isinstance(value, str) else _json(value)}"
                f"{self.value_end}"
                for key, value in arguments.items()
            ]
            texts.append(f"{self.head}{name}{self.head_end}{''.join(values)}{self.after}")
        return self.trigger + self.again.join(texts)

    def grammar(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        call = lark.rule(" | ".join(self._call_grammar(lark, tool) for tool in tools))
        return f"{call} ({lark.literal(self.again)} {call})*" if parallel else call

    def _call_grammar(self, lark: Lark, tool: Tool) -> str:
        schema = tool.parameters
        properties, required = schema.get("properties", {}), schema.get("required", [])
        parameters = [
            f"({self._parameter_grammar(lark, key, tool)}){'' if key in required else '?'}"
            for key in properties
        ]
        if not properties and schema.get("additionalProperties") is not False:
            parameters = [f"({self._free_parameter(lark)})*"]
        head = lark.literal(self.head + tool.name + self.head_end)
        return f"{head} {' '.join(parameters)} {lark.literal(self.after)}"

    def _parameter_grammar(self, lark: Lark, key: str, tool: Tool) -> str:
        schema = tool.parameters["properties"][key]
        head, types = lark.literal(self.parameter + key + self.key_end), types_of(schema, tool.parameters)
        texts = [quoted(choice) for choice in listed(schema, "enum") if isinstance(choice, str)]
        if types == {"string"} and texts:
            return f"{head} ({' | '.join(texts)}) {lark.literal(self.value_end)}"
        if "string" in types:
            if tool.strict:
                _check_text(schema, types, f"tools: {tool.name}.{key}")
            return f"{head} {lark.text_through(self.value_end)}"
        part = replace(tool, parameters=_with_definitions(schema, tool.parameters))
        value = lark.schema(part.enforced)
        return f"{head} {value} {lark.literal(self.value_end)}"

    def _free_parameter(self, lark: Lark) -> str:
        head = f"{lark.literal(self.parameter)} {_ANY_KEY} {lark.literal(self.key_end)}"
        return f"{head} {lark.text_through(self.value_end)}"


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema with what its references are usually to."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**schema, **definitions} if isinstance(schema, Mapping) else definitions


def _check_text(schema: Any, types: frozenset[str], where: str) -> None:
    """Raise RequestError for what cannot be enforced of a value that may be bare text."""
    others = types - {"string", "null", "boolean"}
    if others:
        raise RequestError(f"{where}: text beside {', '.join(sorted(others))} cannot be enforced", "tools")
    parts = [schema, *listed(schema, "anyOf"), *listed(schema, "oneOf")]
    for keyword in ("minLength", "maxLength", "pattern", "format", "enum", "const", "$ref", "allOf"):
        if any(isinstance(part, Mapping) and keyword in part for part in parts):
            raise RequestError(
                f"{where}: {keyword} of a text cannot be enforced in this model's calls", "tools"
            )


def _as_json(value: str, types: frozenset[str]) -> str:
    """A bare value as JSON: what it is by itself where the schema allows that, else a string."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return _json(value)
    return value.strip() if json_type(parsed) in types else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _json(text)[1:-1]
