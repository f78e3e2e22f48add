"""Grammars of answers, as llguidance follows them: calls where they must or may be, schemas, reasoning."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from fake_models import chat_tokenizer
from jsonschema import Draft202012Validator

from quantd.daemon.answer_grammar import AnswerGrammar
from quantd.daemon.reasoning import ReasoningTags, Start
from quantd.daemon.scanner import ReadOutput
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.tool_formats import families
from quantd.daemon.tool_formats.format import CallRules, Calls, Tool, ToolFormat
from quantd.daemon.tool_formats.lark import Lark
from quantd.engine.errors import RequestError

FORMATS: dict[str, ToolFormat] = {
    name: value for name, value in vars(families).items() if name.isupper() and not name.startswith("_")
}
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<think>",
    "</think>",
]
THINK = ReasoningTags("<think>", "</think>")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
LEVEL = {
    "type": "object",
    "properties": {
        "level": {"type": "integer", "enum": [42, -7]},
        "opts": {"$ref": "#/$defs/opts"},
        "mode": {"type": "string", "enum": ["on", 'o"ff']},
    },
    "required": ["level", "opts"],
    "additionalProperties": False,
    "$defs": {
        "opts": {
            "type": "object",
            "properties": {"hold": {"type": "boolean"}},
            "required": ["hold"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [Tool("ping_relay", NOTHING), Tool("set_level", LEVEL)]
LEVEL_CALL: tuple[str, dict[str, Any]] = ("set_level", {"level": 42, "opts": {"hold": True}})


class Checker:
    """Grammars over a tokenizer that has some marks as tokens."""

    def __init__(self, marks: Sequence[str], special: bool) -> None:
        core = chat_tokenizer()
        core.add_tokens([tokenizers.AddedToken(mark, special=special) for mark in marks])
        self.tokenizer = Tokenizer(core, {}, None, ())
        self.masks = llguidance.LLTokenizer(core.to_str())

    def grammar(
        self,
        format: ToolFormat,
        rules: CallRules | None,
        tags: ReasoningTags | None = None,
        start: Start = "over",
        form: str | None = None,
    ) -> str:
        lark = Lark(self.tokenizer)
        embedded = None if form is None else lark.embed(form)
        return AnswerGrammar(lark, tags, start, format, rules, embedded).text()

    def allows(self, grammar: str, text: str) -> bool:
        """Whether the grammar allows a text as a whole."""
        return self._follow(grammar, text).is_accepting()

    def begins(self, grammar: str, text: str) -> bool:
        """Whether it allows a text as the beginning of an answer."""
        return not self._follow(grammar, text).is_error()

    def _follow(self, grammar: str, text: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.masks, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        matcher.consume_tokens(self.tokenizer.encode(text))
        return matcher


CHECKERS = {
    "special tokens": Checker(MARKS, special=True),
    "added tokens": Checker(MARKS, special=False),
    "no tokens": Checker((), special=False),
}
checkers = pytest.mark.parametrize("checker", CHECKERS.values(), ids=CHECKERS)
formats = pytest.mark.parametrize("name", FORMATS)


def written(format: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as an answer begins with them when it has to call."""
    text = format.write(calls)
    if format.starts_bare:
        text = text.removeprefix(format.trigger)
    if format is families.MISTRAL_IDS:
        text = text.replace("[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]")
    return text


@formats
@checkers
def test_required_calls(checker: Checker, name: str) -> None:
    format = FORMATS[name]
    grammar = checker.grammar(format, CallRules(TOOLS, required=True))
    assert checker.allows(grammar, written(format, ("ping_relay", {})))
    assert checker.allows(grammar, written(format, LEVEL_CALL))
    assert checker.allows(grammar, written(format, (LEVEL_CALL[0], LEVEL_CALL[1] | {"mode": "on"})))
    for arguments in ({"level": 41, "opts": {"hold": True}}, {"level": 42}, LEVEL_CALL[1] | {"x": 1}):
        assert not checker.begins(grammar, written(format, ("set_level", arguments)))
    assert not checker.begins(grammar, written(format, ("other", {})))
    assert not checker.begins(grammar, "I will call. " + written(format, ("ping_relay", {})))
    assert not checker.allows(grammar, "") and not checker.begins(grammar, "So")
    assert not checker.begins(grammar, written(format, ("ping_relay", {})) + " Done.")


@formats
@checkers
def test_how_many_calls(checker: Checker, name: str) -> None:
    format = FORMATS[name]
    two = written(format, LEVEL_CALL, ("ping_relay", {}))
    parallel = name not in ("GENERIC", "LLAMA")
    assert checker.allows(checker.grammar(format, CallRules(TOOLS, required=True)), two) == parallel
    assert not checker.begins(checker.grammar(format, CallRules(TOOLS, True, parallel=False)), two)


@formats
@checkers
def test_calls_that_may_be(checker: Checker, name: str) -> None:
    format = FORMATS[name]
    grammar = checker.grammar(format, CallRules(TOOLS))
    for text in ("", "So.", "1 < 2 and [TOOL or <tool", "  \n{ 'a': 1 }", "é 漢字 🧵"):
        assert checker.allows(grammar, text), text
        call = format.write([LEVEL_CALL])
        if format is families.MISTRAL_IDS:
            call = call.replace("[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]")
        assert checker.allows(grammar, text + call), text
    assert checker.allows(grammar, written(format, LEVEL_CALL))
    assert not checker.begins(grammar, f"So {format.trigger} and so on")
    assert not checker.allows(grammar, f"So {format.trigger}")


@checkers
def test_what_looks_like_a_call_is_one(checker: Checker) -> None:
    grammar = checker.grammar(families.LLAMA, CallRules(TOOLS))
    assert not checker.begins(grammar, '{"name": "other"')
    assert not checker.begins(grammar, '\n{ "function": "ping_relay"')
    assert checker.allows(grammar, '{"a": 1}')


@pytest.mark.parametrize("start", ["inside", "possible", "over"])
@pytest.mark.parametrize("required", [True, False])
@checkers
def test_reasoning_goes_first(checker: Checker, required: bool, start: Start) -> None:
    grammar = checker.grammar(families.HERMES, CallRules(TOOLS, required), THINK, start)
    call = families.HERMES.write([LEVEL_CALL])
    thoughts = {"inside": "So {[ 1 < 2.\n</think>\n\n", "possible": "<think>\nSo.\n</think>\n\n", "over": ""}
    assert checker.allows(grammar, thoughts[start] + call)
    assert checker.allows(grammar, thoughts[start] + "I call.\n" + call) != required
    assert checker.allows(grammar, call) == (start != "inside")
    if start != "inside":
        assert checker.begins(grammar, "<think>\nSo.") == (start == "possible")
    assert not checker.allows(grammar, "<think>\nSo.")
    assert checker.allows(grammar, thoughts[start] + "No call.") != required


TEXTS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "more": {"$ref": "#/$defs/more"},
    },
    "required": ["path"],
    "$defs": {"more": {"type": "array", "items": {"type": "boolean"}}},
}


@pytest.mark.parametrize("name", ["QWEN_CODER", "SEED"])
@checkers
def test_bare_values(checker: Checker, name: str) -> None:
    format = FORMATS[name]
    grammar = checker.grammar(format, CallRules([Tool("edit", TEXTS, strict=True)], required=True))
    for arguments in (
        {"path": "a.py"},
        {"path": 'x = "<b>"\n\n', "line": -4, "note": "null?", "more": [True, False]},
        {"path": "", "note": None},
    ):
        assert checker.allows(grammar, written(format, ("edit", arguments))), arguments
    for arguments in ({}, {"line": 4}, {"path": "a", "line": "four"}, {"path": "a", "more": [1]}):
        assert not checker.begins(grammar, written(format, ("edit", arguments))), arguments
    anything = checker.grammar(format, CallRules([Tool("edit", {"type": "object"})], required=True))
    assert checker.allows(anything, written(format, ("edit", {"any": "thing", "else": [1]})))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "^a"}, "pattern"),
        ({"type": "string", "maxLength": 4}, "maxLength"),
        ({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, "format"),
        ({"type": ["string", "integer"]}, "integer"),
        ({}, "array"),
    ],
)
def test_bare_values_that_cannot_be_held_to_a_strict_schema(schema: dict[str, Any], keyword: str) -> None:
    checker = CHECKERS["no tokens"]
    parameters = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(RequestError, match=rf"x.*{keyword}"):
        checker.grammar(families.QWEN_CODER, CallRules([Tool("f", parameters, strict=True)]))
    grammar = checker.grammar(families.QWEN_CODER, CallRules([Tool("f", parameters)], required=True))
    assert checker.allows(grammar, families.QWEN_CODER.write([("f", {"x": "any text"})]))


JSON_FORM = '%llguidance {}\nstart: %json {"type": "object", "properties": {"a": {"type": "integer"}}}\n'


@checkers
def test_an_answer_of_a_form(checker: Checker) -> None:
    inside = checker.grammar(families.HERMES, None, THINK, "inside", JSON_FORM)
    assert checker.allows(inside, 'So {"b"\n</think>\n\n{"a": 1}')
    assert not checker.begins(inside, "So.\n</think>\n\nThe answer")
    either = checker.grammar(families.HERMES, CallRules(TOOLS), None, "over", JSON_FORM)
    assert checker.allows(either, '{"a": 1}') and not checker.begins(either, "The")
    assert checker.allows(either, families.HERMES.write([LEVEL_CALL]))
    format = families.LLAMA.triggered()
    llama = checker.grammar(format, CallRules(TOOLS), None, "over", JSON_FORM)
    assert checker.allows(llama, '{"a": 1}') and checker.allows(llama, format.write([LEVEL_CALL]))


def drawn(checker: Checker, grammar: str, rng: random.Random) -> str | None:
    """A random text that the grammar allows; None where it did not come to an end."""
    matcher = llguidance.LLMatcher(checker.masks, grammar, log_level=0)
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 400:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        ends = [token for token in allowed if token == checker.masks.eos_token]
        # Ends come often, and so does what closes strings and objects, else few texts would end.
        closing = [token for token in allowed if checker.tokenizer.token_bytes(token) in CLOSING]
        ids.append(rng.choice(ends if ends and rng.random() < 0.5 else closing or allowed))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    if not matcher.is_stopped():
        return None
    return checker.tokenizer.decode(
        [token for token in ids if token != checker.masks.eos_token], special=True
    )


CLOSING = {b'"', b"}", b"]", b",", b":"}


@formats
@checkers
def test_all_that_a_grammar_allows_is_read_as_calls_of_the_tools(checker: Checker, name: str) -> None:
    format = FORMATS[name]
    grammar = checker.grammar(format, CallRules(TOOLS, required=True))
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    rng, num_read = random.Random(7), 0
    for _ in range(12):
        text = drawn(checker, grammar, rng)
        if text is None:
            continue
        parser = ReadOutput(lambda scanner: format.read(scanner, Calls(schemas, str)), frozenset())
        pieces = [*parser.feed(text), *parser.flush()]
        assert not any(piece.text for piece in pieces), text
        deltas = [piece.tool_call for piece in pieces if piece.tool_call is not None]
        for index, calls in itertools.groupby(deltas, lambda delta: delta.index):
            first, *parts = calls
            assert first.name is not None, index
            arguments = json.loads("".join(part.arguments for part in parts))
            Draft202012Validator(schemas[first.name]).validate(arguments)
        num_read += 1
    assert num_read > 3
