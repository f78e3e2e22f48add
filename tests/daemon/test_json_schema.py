"""Schemas as they are enforced, against an independent validator; and those that are refused, by name."""

from __future__ import annotations

import datetime
import ipaddress
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from json_schemas import answers, compiled, documents, is_valid, takes

from quantd.daemon.constraints import JsonObject, JsonSchema, json_rule
from quantd.daemon.json_schema import MAX_DEPTH, MAX_SCHEMAS, enforceable, loosened
from quantd.engine.errors import RequestError

CASES = Path(__file__).parents[1] / "data" / "cases"
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def grammar_of(schema: Any) -> str:
    return JsonSchema(schema, "response_format").grammar()


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(documents(), st.randoms(use_true_random=False))
def test_every_answer_is_valid_whatever_the_schema(schema: dict[str, Any], random: Random) -> None:
    try:
        grammar = grammar_of(schema)
    except RequestError as error:
        assert any(name in str(error) for name in ("minProperties", "exclusive")), error
        return
    assume(not compiled(grammar).is_error())
    for text in answers(grammar, random, count=3):
        assert is_valid(text, schema), text


REFUSED: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "uniqueItems": {"properties": {"a": {"items": {"type": "array", "uniqueItems": True}}}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"$ref": "#/$defs/x", "$defs": {"x": {"unevaluatedProperties": False}}},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "divisibleBy": {"divisibleBy": 2},
    "$ref 'https://example.com/s.json'": {"$ref": "https://example.com/s.json"},
    "$ref '#/$defs/gone'": {"anyOf": [{"$ref": "#/$defs/gone"}]},
    "$ref '#anchor'": {"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}},
    "$id": {"properties": {"a": {"$id": "https://example.com/other"}}},
    "minProperties": {"type": "object", "minProperties": 2, "required": ["a", {}, "a"]},
    "const 9007199254740993": {"const": 9007199254740993},
    "enum 0.12345678901234568": {"enum": [{"a": [0.12345678901234568]}]},
    "maximum 1e+300": {"maximum": 1e300},
    "exclusiveMinimum 0": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    "exclusiveMaximum 2": {"$ref": "#/$defs/a", "exclusiveMaximum": 2, "$defs": {"a": {"minimum": 1.5}}},
    "must be an object": {"properties": {"a": 5}},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(word: str) -> None:
    with pytest.raises(RequestError) as refused:
        enforceable(REFUSED[word], "response_format")
    assert word in str(refused.value)
    assert str(refused.value).startswith("response_format: ")
    assert refused.value.param == "response_format"


def test_too_much_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    wide = {"properties": {str(i): {} for i in range(MAX_SCHEMAS)}}
    meeting = {"allOf": [{"minLength": i} for i in range(300)]}
    for schema in (deep, wide, meeting):
        with pytest.raises(RequestError, match="more than"):
            enforceable(schema, "response_format")
        loosened(schema)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("nope", {"type": "string", "format": "nope"}),
        ("oneOf", {"oneOf": [{"type": "string"}, {"minLength": 2}]}),
        ("look-ahead", {"pattern": "(?=a)b"}),
        ("patternProperty", {"patternProperties": {"^a": {}, "a$": {"type": "null"}}}),
    ],
)
def test_llguidance_refuses_the_rest_by_name(keyword: str, schema: Any) -> None:
    assert keyword in compiled(grammar_of(schema)).get_error()


def test_what_asks_for_nothing_is_no_fault() -> None:
    """Libraries that write schemas put such into them."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/schema",
        "title": "T",
        "description": "not if then else",
        "type": "object",
        "properties": {
            "not": {"type": "array", "items": {"type": "integer", "format": "int32"}, "uniqueItems": False},
            "if": {"type": "string", "deprecated": True, "x-order": 1, "contentEncoding": "base64"},
        },
        "propertyNames": {"type": "string"},
        "required": ["not", "if"],
        "additionalProperties": False,
        "x-guidance": {"lenient": True, "whitespace_flexible": True},
        "definitions": {"unused": {"not": {}}},
    }
    grammar = grammar_of(schema)
    assert takes(grammar, '{"not": [1,2], "if":"x"}')
    assert not takes(grammar, '{"not":  [1], "if":"x"}')


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # Tuples of older drafts.
        ({"items": [{"type": "null"}], "additionalItems": False}, ["[null]", "[]", "1"], ["[1]", "[null,1]"]),
        ({"prefixItems": [{"type": "null"}], "additionalItems": False}, ["[null, 1]"], ["[1]"]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.5"], ["1"]),
        ({"definitions": {"a/b": {"const": 1}}, "$ref": "#/definitions/a~1b"}, ["1"], ["2"]),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "anyOf": [True]}, [], ['{"a":{}}']),
        ({"type": "array", "items": {"$ref": "#"}}, ["[]", "[[], [[]]]"], ["[1]"]),
        # A name is the same name however it is written.
        ({"properties": {"a": {"type": "null"}}}, ['{"a":null}'], [r'{"\u0061":1}', '{"a":1}']),
        ({"type": "string"}, [r'"\n\u001b"'], [r'"\u0061"', '"\n"']),
        ({"type": "object", "minProperties": 1}, ['{"":1}'], ["{}"]),
        ({"minProperties": 2, "required": ["a", "b"], "type": "object"}, ['{"a":1,"b":1}'], ['{"a":1}']),
        (True, ["null", '{"a": [1, {}]}'], ["", "nul"]),
        ({"enum": ["é😀", 1, None]}, ['"é😀"', "1"], ['"1"', "true"]),
    ],
    ids=str,
)
def test_words_mean_what_they_mean(schema: Any, valid: list[str], invalid: list[str]) -> None:
    grammar = grammar_of(schema)
    assert [takes(grammar, text) for text in valid] == [True] * len(valid)
    assert [takes(grammar, text) for text in invalid] == [False] * len(invalid)


def parses(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


FORMATS = {
    "date": parses(datetime.date.fromisoformat),
    "date-time": parses(lambda text: datetime.datetime.fromisoformat(text.upper())),
    "time": parses(lambda text: datetime.time.fromisoformat(text.upper())),
    "uuid": parses(uuid.UUID),
    "ipv4": parses(ipaddress.IPv4Address),
    "ipv6": parses(ipaddress.IPv6Address),
    "hostname": lambda text: 0 < len(text) <= 253 and all(0 < len(part) < 64 for part in text.split(".")),
    "email": lambda text: "@" in text[1:-1],
}


@pytest.mark.parametrize("format", FORMATS)
def test_formats_hold(format: str) -> None:
    found = list(answers(grammar_of({"type": "string", "format": format}), Random(format), count=100))
    assert len(found) > 20
    assert [text for text in map(json.loads, found) if not FORMATS[format](text)] == []


@pytest.mark.parametrize(
    ("text", "valid"),
    [("2024-02-29", True), ("2023-02-29", False), ("1900-02-29", False), ("2000-02-29", True)],
)
def test_a_date_is_in_the_calendar(text: str, valid: bool) -> None:
    assert takes(grammar_of({"format": "date", "pattern": "^2|^1"}), f'"{text}"') == valid
    assert takes(grammar_of({"format": "date-time"}), f'"{text}T23:59:59Z"') == valid


def shuffled(value: Any, random: Random) -> Any:
    """A schema with its keywords in another order. Properties come as they are declared."""
    if not isinstance(value, dict):
        return value
    items = [(key, shuffled(one, random)) for key, one in value.items()]
    if not {"level", "tag"} & value.keys():
        random.shuffle(items)
    return dict(items)


def test_the_order_of_keywords_changes_nothing() -> None:
    schema = json.loads((CASES / "c27.json").read_text())["body"]["response_format"]["json_schema"]["schema"]
    texts = [
        '{"level": "low", "code": null, "flags": [true, false], "chain": {"tag": "ab", "next": null}}',
        '{"level":"high","code":1,"flags":[true,true],"chain":{"tag":"","next":{"tag":"x","next":null}}}',
    ]
    wrong = [
        '{"level": {}, "code": null, "flags": [true, false], "chain": {"tag": "ab", "next": null}}',
        '{"level": "low", "code": "1", "flags": [true, false], "chain": {"tag": "ab", "next": null}}',
        '{"level": "low", "code": 1, "flags": [true], "chain": {"tag": "ab", "next": null}}',
        '{"level": "low", "code": 1, "flags": [true, true], "chain": {"tag": "abcde", "next": null}}',
        '{"level": "low", "code": 1, "flags": [true, true], "chain": {"tag": "a", "next": null}, "x": 1}',
        '{"level": "low",  "code": 1, "flags": [true, true], "chain": {"tag": "a", "next": null}}',
    ]
    for seed in range(5):
        grammar = grammar_of(shuffled(schema, Random(seed)))
        assert [takes(grammar, text) for text in texts] == [True] * len(texts)
        assert [takes(grammar, text) for text in wrong] == [False] * len(wrong)


def test_any_object_is_an_object() -> None:
    grammar = JsonObject().grammar()
    assert takes(grammar, '{"a": [1, {"b": null}], "c":""}')
    assert not any(takes(grammar, text) for text in ("[]", "1", ' {"a":1}', '{"a":\n1}'))


KEYWORDS = [
    *("type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref", "items", "prefixItems", "properties", "a"),
    *("required", "pattern", "format", "minimum", "not", "if", "$defs", "additionalProperties", "minLength"),
]
JUNK = st.recursive(
    st.none() | st.booleans() | st.sampled_from([1, 2.5, 1e300, "a", "object", "any", "#", "#/$defs/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(st.dictionaries(st.sampled_from(KEYWORDS), JUNK))
@example({"anyOf": [False]})
@example({"properties": {"a": False}, "required": ["a"]})
@example({"prefixItems": [False], "items": {"oneOf": [False, False]}})
def test_whatever_is_loosened_can_be_enforced(schema: dict[str, Any]) -> None:
    assert not compiled(f"start: {json_rule(loosened(schema))}").get_error()


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(documents(), st.randoms(use_true_random=False))
def test_what_is_valid_is_so_when_loosened(schema: dict[str, Any], random: Random) -> None:
    """As far as names come in the order of their properties."""
    try:
        grammar = grammar_of(schema)
    except RequestError:
        return
    assume(not compiled(grammar).is_error())
    for text in answers(grammar, random, count=2):
        assert is_valid(text, loosened(schema)), text
