"""Calls whose arguments stand in tags, one parameter each, as Qwen-coder and Seed write them.

Values are bare text: the tool's schema says which of them are strings and which JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quantd.daemon.scanner import Scanner, Steps, as_text
from quantd.daemon.tool_formats.format import MAX_NAME_LEN, Calls, Tool
from quantd.daemon.tool_formats.lark import Lark, quoted
from quantd.daemon.tool_formats.schemas import json_type, types_of

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
        call = lark.rule(" | ".join(self._call_grammar(lark, tool.name, tool.parameters) for tool in tools))
        return f"{call} ({lark.literal(self.again)} {call})*" if parallel else call

    def _call_grammar(self, lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        parameters = [
            f"({self._parameter_grammar(lark, key, part, schema)}){'' if key in required else '?'}"
            for key, part in properties.items()
        ]
        if not properties and schema.get("additionalProperties") is not False:
            parameters = [f"({self._free_parameter(lark)})*"]
        head = lark.literal(self.head + name + self.head_end)
        return f"{head} {' '.join(parameters)} {lark.literal(self.after)}"

    def _parameter_grammar(self, lark: Lark, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        head, types = lark.literal(self.parameter + key + self.key_end), types_of(schema, root)
        if isinstance(schema, dict) and types == {"string"} and "enum" in schema:
            choices = " | ".join(quoted(choice) for choice in schema["enum"])
            return f"{head} ({choices}) {lark.literal(self.value_end)}"
        if "string" in types:
            return f"{head} {lark.text_through(self.value_end)}"
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        whole = {**schema, **definitions} if isinstance(schema, dict) else {}
        return f"{head} {lark.schema(whole)} {lark.literal(self.value_end)}"

    def _free_parameter(self, lark: Lark) -> str:
        head = f"{lark.literal(self.parameter)} {_ANY_KEY} {lark.literal(self.key_end)}"
        return f"{head} {lark.text_through(self.value_end)}"


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
