"""JSON schemas at random, answers that a grammar allows, and what a validator says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import cache
from random import Random
from typing import Any

import jsonschema
import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from quantd.engine.grammar import Matcher
from quantd.engine.plan import RequestState
from quantd.engine.request import Request, SamplingParams
from quantd.engine.token_masks import TokenMasks

NAMES = st.sampled_from(["a", "b", "ab", "é", "a b", '"', "x/y"])
TEXTS = st.sampled_from(["", "a", "b c", '"', "\\", "é", "漢字", "😀", "\n", "a/b", "\u0001"])
NUMBERS = st.sampled_from([0, 1, -1, 2, 5, -3, 10, 100, 0.5, -2.5, 1.25, 99.99, 1e3, 0.001])
PATTERNS = ["^a", "b$", "^[a-z]{2,4}$", "[0-9]+", r"^\d{3}-\d{4}$", r"\w", "a|b", "^(foo|bar)$", "^.{1,3}$"]
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
_NUMBER = {
    "minimum": NUMBERS,
    "maximum": NUMBERS,
    "exclusiveMinimum": NUMBERS,
    "exclusiveMaximum": NUMBERS,
    "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.1, 0.25, 1.5]),
}
_SIMPLE: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "string": {
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(3, 8),
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(["date", "ipv4", "uuid", "email"]),
    },
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": {},
    "null": {},
}


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> Any:
    """A schema; `$ref` is to one of the definitions of `documents`. Its keywords stand in any order."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from([True, {}]))
    kinds = sorted(_SIMPLE) + (["object", "array"] * 2 if depth else [])
    types = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2, unique=True))
    schema: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    for kind in types:
        schema |= draw(_some(_options(kind, depth - 1)))
    others = {"enum": st.lists(VALUES, min_size=1, max_size=3), "const": VALUES}
    if depth:
        inner = st.lists(schemas(depth - 1), min_size=1, max_size=2)
        others |= {"anyOf": inner, "allOf": inner, "oneOf": inner}
        others["$ref"] = st.sampled_from(["#/$defs/A", "#/$defs/B"])
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from(sorted(others)))
        schema[key] = draw(others[key])
    return dict(draw(st.permutations(list(schema.items()))))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A schema with what it refers to."""
    root = draw(schemas().filter(lambda schema: isinstance(schema, dict)))
    return {**root, "$defs": {"A": draw(schemas(1)), "B": draw(schemas(2))}}


@st.composite
def _some(draw: st.DrawFn, options: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=3)) if options else []
    return {name: draw(options[name]) for name in names}


def _options(kind: str, depth: int) -> dict[str, st.SearchStrategy[Any]]:
    """Keywords for a type. depth: of the schemas in them."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    inner = schemas(depth)
    if kind == "object":
        return {
            "properties": st.dictionaries(NAMES, inner, min_size=1, max_size=3),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": st.just(False) | inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "^x", "[0-9]$"]), inner, max_size=1),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 3),
        }
    return {
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "additionalItems": st.booleans() | inner,
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(1, 3),
    }


def is_valid(text: str, schema: Any) -> bool:
    """What an independent validator of 2020-12 says, formats included; decimals are exact."""
    instance = json.loads(text, parse_float=Decimal)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return bool(_Validator(exact, format_checker=jsonschema.FormatChecker()).is_valid(instance))


def _is_integer(checker: object, value: object) -> bool:
    whole = isinstance(value, Decimal) and value == value.to_integral_value()
    return (isinstance(value, int) or whole) and not isinstance(value, bool)


def _is_number(checker: object, value: object) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_integer, "number": _is_number}
    ),
)


class ByteTokenizer:
    """A token for each byte, and one that ends."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(ByteTokenizer())


def compiled(grammar: str) -> LLMatcher:
    return LLMatcher(byte_tokenizer(), grammar, log_level=0)


def takes(grammar: str, text: str) -> bool:
    """Whether a text is a whole answer by a grammar."""
    matcher, ids = compiled(grammar), list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def answers(grammar: str, random: Random, count: int, most: int = 300) -> Iterator[str]:
    """Texts by a grammar, drawn byte by byte.

    Left out are those that do not end in time, and those with numbers that no validator computes with.
    """
    start = compiled(grammar)
    assert not start.is_error(), start.get_error()
    for _ in range(count):
        text = _answer(start.deep_copy(), random, most)
        if text is not None and not re.search(r"[eE][+-]?\d{4}", text):
            yield text


def _answer(core: LLMatcher, random: Random, most: int) -> str | None:
    params = SamplingParams(grammar="", stop_token_ids=(256,))
    state = RequestState(Request(id="", prompt=[0], sampling=params))
    state.matcher = Matcher(core, byte_tokenizer(), (256,), 0)
    while len(state.output) < most:
        ids = _allowed(state)
        if not ids:
            return None
        ending = _ENDING.intersection(ids)
        late = len(state.output) > 20 and random.random() < 0.8
        state.output.append(random.choice(sorted(ending) if late and ending else ids))
        if state.output[-1] == 256:
            return bytes(state.output[:-1]).decode()
    return None


_MASKS = TokenMasks(0)
_ENDING = frozenset(b'"]},') | {256}


def _allowed(state: RequestState) -> Sequence[int]:
    bits = _MASKS.start([state]).result().bits
    assert bits is not None
    return np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")).tolist()
