"""Tool calls in every format: what is written is read back, in whatever parts it comes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantd.daemon.output_parser import Piece
from quantd.daemon.scanner import ReadOutput
from quantd.daemon.tool_formats import families
from quantd.daemon.tool_formats.format import Calls, ToolFormat, read_tools
from quantd.daemon.tool_formats.json_calls import JsonCalls
from quantd.daemon.tool_formats.xml_calls import XmlCalls
from quantd.engine.errors import RequestError

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


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_cut_off(name: str) -> None:
    format = FORMATS[name]
    text = "So. " + format.write([("set_level", {"text": 'a"}\n', "level": 42}), ("ping_relay", {})])
    (_, _, arguments), _ = read(format, [text]).calls
    for end in range(len(text)):
        cut = read(format, [text[:end]])
        assert read(format, list(text[:end])) == cut
        assert len(cut.calls) < 2 or cut.calls[0][2] == arguments
        # A bare value's end may begin like more of the value.
        if cut.calls and isinstance(format, JsonCalls):
            assert arguments.startswith(cut.calls[0][2])
        assert cut.calls or text.startswith(cut.text)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("junk", ["", " ", "\n", "{", '[{"name": 5}]', "no call", "x" * 300, "\n<function=>"])
def test_a_trigger_without_a_call_is_content(name: str, junk: str) -> None:
    format = FORMATS[name]
    text = f"So \n{format.trigger}{junk}"
    assert same_at_every_cut(format, text) == Read(text)


def test_white_space_between_calls_is_no_content() -> None:
    call = families.HERMES.write([("ping_relay", {})])
    result = same_at_every_cut(families.HERMES, f"\n\n{call}\n\n {call}\nDone.\n")
    assert (result.text, len(result.calls)) == ("Done.\n", 2)
    assert same_at_every_cut(families.HERMES, call + "\n").text == ""


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ('{"name": "ping_relay", "parameters": {}}', "", 1),
        ('\n{"name": "ping_relay", "parameters": {}}', "", 1),
        ('<|python_tag|>{"name": "ping_relay", "parameters": {}}', "", 1),
        ('So: {"name": "ping_relay", "parameters": {}}', 'So: {"name": "ping_relay", "parameters": {}}', 0),
        ('{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', 0),
        ('{"name": "ping_relay", "parameters": 5}', '{"name": "ping_relay", "parameters": 5}', 0),
        ("{}", "{}", 0),
    ],
)
def test_llama_may_do_without_a_trigger(text: str, content: str, num_calls: int) -> None:
    result = same_at_every_cut(families.LLAMA, text)
    assert (result.text, len(result.calls)) == (content, num_calls)


def test_ids_that_the_model_writes_are_not_used() -> None:
    result = same_at_every_cut(
        families.MISTRAL_IDS, '[TOOL_CALLS]set_level[CALL_ID]a1B2c3D4e[ARGS]{"level": 4}'
    )
    assert result.calls == [["call0", "set_level", '{"level": 4}']]


VALUES = [
    ("level", "42", 42),
    ("level", " 42\n", 42),
    ("level", "many", "many"),
    ("opts", '{"hold": [true, "}"]}', {"hold": [True, "}"]}),
    ("text", "42", "42"),
    ("text", "null", "null"),
    ("text", ' "quoted"\n\n', ' "quoted"\n\n'),
    ("either", "null", None),
    ("either", "42", "42"),
    ("either", "[1, 2]", [1, 2]),
    ("either", "[1, 2", "[1, 2"),
    ("unknown", "42", 42),
    ("unknown", "so", "so"),
]


@pytest.mark.parametrize(("key", "value", "expected"), VALUES)
@pytest.mark.parametrize("format", [families.QWEN_CODER, families.SEED])
def test_bare_values_are_read_by_the_schema(format: XmlCalls, key: str, value: str, expected: object) -> None:
    text = format.write([("set_level", {key: value})])
    ((_, _, arguments),) = same_at_every_cut(format, text).calls
    assert json.loads(arguments) == {key: expected}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([format for format in FORMATS.values() if isinstance(format, JsonCalls)]),
    st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=3), min_size=1, max_size=3),
    st.data(),
)
def test_any_arguments_at_any_cuts(
    format: JsonCalls, arguments: list[dict[str, Any]], data: st.DataObject
) -> None:
    text = "So." + format.write([("f", one) for one in arguments])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    result = read(format, parts)
    assert result.text == "So." and [json.loads(call[2]) for call in result.calls] == arguments


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.sampled_from(["\n", " ", "{", "}", '"', "a", "[", "]", ", ", "set_level", "0", "4", "5"])),
    st.data(),
)
def test_any_text_at_any_cuts(format: ToolFormat, parts: list[str], data: st.DataObject) -> None:
    marks = [mark for mark in format.markup if mark]
    text = "".join(marks[int(part) % len(marks)] if part.isdigit() else part for part in parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format, pieces) == read(format, [text])


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function"}], "tools[0].function"),
        ([{"function": {"name": ""}}], "tools[0].function.name"),
        ([{"function": {"name": 'a"b'}}], "tools[0].function.name"),
        ([{"function": {"name": "x" * 129}}], "tools[0].function.name"),
        ([{"function": {"name": "a"}}, {"function": {"name": "a"}}], "tools[1].function.name"),
        ([{"function": {"name": "a", "parameters": []}}], "tools[0].function.parameters"),
        ([{"function": {"name": "a", "parameters": {"type": "string"}}}], "tools[0].function.parameters"),
    ],
)
def test_tools_that_are_none(tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_tools(tools)
    assert refused.value.param == param


def test_a_tool_may_have_no_parameters() -> None:
    (tool,) = read_tools([{"function": {"name": "mcp__files.read/a:b-c", "parameters": None}}])
    assert tool.parameters == {"type": "object", "properties": {}} and not tool.strict
