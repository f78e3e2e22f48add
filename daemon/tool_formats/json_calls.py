"""Calls whose arguments are a JSON object, between the fixed texts of one family or another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quantd.daemon.scanner import Scanner, Steps, as_text
from quantd.daemon.tool_formats.format import MAX_NAME_LEN, Calls, Tool
from quantd.daemon.tool_formats.json_text import JsonEnd
from quantd.daemon.tool_formats.lark import Lark

# A model's own id of a call, as Mistral's have them.
_ID_LEN = 9


@dataclass(frozen=True)
class JsonCalls:
    """The texts are: trigger opening, then for each call head name between arguments after, then closing.

    again: stands between two calls. id_mark: if any, the model writes an id of its own after the name,
    behind this mark. parallel: whether it may call more than once in an answer. starts_bare: see ToolFormat.
    """

    trigger: str
    head: str
    between: str
    after: str
    again: str
    opening: str = ""
    closing: str = ""
    id_mark: str = ""
    parallel: bool = True
    starts_bare: bool = False

    @property
    def markup(self) -> Sequence[str]:
        texts = (getattr(self, part.name) for part in fields(self))
        return [text for text in texts if isinstance(text, str)]

    def read(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        if self.starts_bare:
            space = yield from scanner.space()
            if not (yield from self._read_calls(scanner, calls)):
                scanner.unread(space)
        while (lead := (yield from scanner.give_words_before(self.trigger, as_text))) is not None:
            if not (yield from self._read_calls(scanner, calls)):
                yield as_text(lead + self.trigger)

    def _read_calls(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        """Read what follows a trigger. False, and nothing read, where it is no call."""
        if not (yield from scanner.take(self.opening)):
            return False
        if not (yield from self._read_call(scanner, calls)):
            scanner.unread(self.opening)
            return False
        while (yield from scanner.take(self.again)):
            if not (yield from self._read_call(scanner, calls)):
                scanner.unread(self.again)
                break
        yield from scanner.take(self.closing)
        yield from scanner.space()
        return True

    def _read_call(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        if not (yield from scanner.take(self.head)):
            return False
        words = yield from scanner.until(self.between, limit=MAX_NAME_LEN + len(self.id_mark) + _ID_LEN)
        if words is None or not (yield from scanner.take("{")):
            scanner.unread(self.head if words is None else self.head + words + self.between)
            return False
        scanner.unread("{")
        yield calls.open(words.split(self.id_mark)[0] if self.id_mark else words)
        end = JsonEnd()
        while (size := end.find(scanner.text)) is None:
            yield from scanner.give(len(scanner.text), calls.part)
            if not (yield from scanner.more()):
                return True
        yield from scanner.give(size, calls.part)
        yield from scanner.take(self.after)
        return True

    def triggered(self) -> JsonCalls:
        return replace(self, starts_bare=False)

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Without the ids that a model writes itself."""
        texts = (
            f"{self.head}{name}{self.between}{json.dumps(arguments, ensure_ascii=False)}{self.after}"
            for name, arguments in calls
        )
        return self.trigger + self.opening + self.again.join(texts) + self.closing

    def grammar(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        call = lark.rule(" | ".join(self._call_grammar(lark, tool) for tool in tools))
        more = f"({lark.literal(self.again)} {call})*" if parallel and self.parallel else ""
        return f"{lark.literal(self.opening)} {call} {more} {lark.literal(self.closing)}"

    def _call_grammar(self, lark: Lark, tool: Tool) -> str:
        head = lark.literal(self.head + tool.name + self.id_mark)
        if self.id_mark:
            head += f" /[a-zA-Z0-9]{{{_ID_LEN}}}/"
        arguments = lark.schema(tool.enforced)
        return f"{head} {lark.literal(self.between)} {arguments} {lark.literal(self.after)}"
