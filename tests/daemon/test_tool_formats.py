"""Tool calls in every format: what is written is read back, in whatever parts it comes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from quantd.daemon.output_parser import Piece
from quantd.daemon.scanner import ReadOutput
from quantd.daemon.tool_formats import families
from quantd.daemon.tool_formats.format import Calls, ToolFormat

FORMATS: dict[str, ToolFormat] = {
    name: value for name, value in vars(families).items() if name.isupper() and not name.startswith("_")
}
LEVEL = {
    "type": "object",
    "properties": {
        "level": {"type": "integer"},
        "opts": {"type": "object", "properties": {"hold": {"type": "boolean"}}},
        "text": {"type": "string"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}, {"$ref": "#/$defs/list"}]},
    },
    "$defs": {"list": {"type": "array", "items": {"type": "number"}}},
}
SCHEMAS = {"set_level": LEVEL, "ping_relay": {"type": "object", "properties": {}}}


@dataclass
class Read:
    """What a parser made of a text."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            assert [bool(piece.text), bool(piece.reasoning), piece.tool_call is not None].count(True) == 1
            self.text += piece.text
            if piece.tool_call is None:
                continue
            call = piece.tool_call
            if call.index == len(self.calls):
                assert call.id and call.name is not None
                self.calls.append([call.id, call.name, ""])
            else:
                assert call.index == len(self.calls) - 1 and call.id is None and call.name is None
            self.calls[call.index][2] += call.arguments


def read(format: ToolFormat, parts: Sequence[str]) -> Read:
    """The parts of a text, read one after the other."""
    ids = itertools.count()
    parser = ReadOutput(
        lambda scanner: format.read(scanner, Calls(SCHEMAS, lambda: f"call{next(ids)}")), frozenset()
    )
    result = Read()
    for part in parts:
        result.add(parser.feed(part))
    result.add(parser.flush())
    return result


def same_at_every_cut(format: ToolFormat, text: str) -> Read:
    """What is read of a text, which no cut in two or into characters may change."""
    whole = read(format, [text])
    for cut in range(len(text) + 1):
        assert read(format, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    assert read(format, list(text)) == whole
    return whole


CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "no arguments": [("ping_relay", {})],
    "values that are no strings": [("set_level", {"level": 42, "opts": {"hold": True}})],
    "brackets and quotes in strings": [("set_level", {"text": 'a "}]{[ \\" } \\\\', "level": 1})],
    "line ends, marks, other scripts": [("set_level", {"text": "é\n漢字 🧵\t</x> <b>\n\n"})],
    "two": [("set_level", {"level": -1}), ("ping_relay", {})],
    "three": [("ping_relay", {}), ("set_level", {"text": ""}), ("ping_relay", {})],
}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("before", ["", "I call. ", "One < two, {a: [b]}\n\n"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name: str, before: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    format = FORMATS[name]
    result = same_at_every_cut(format, before + format.write(calls))
    assert result.text == before.rstrip()
    assert [(name, json.loads(arguments)) for _, name, arguments in result.calls] == calls
    assert [id for id, *_ in result.calls] == [f"call{i}" for i in range(len(calls))]
