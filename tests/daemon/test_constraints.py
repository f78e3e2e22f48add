"""What an answer must be: expressions, choices, grammars in other forms; and the process that tries them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from daemon_in_loop import in_loop, running_daemon
from json_schemas import compiled, takes

from quantd.daemon.constraints import (
    Choice,
    Constraint,
    GbnfGrammar,
    JsonSchema,
    LarkGrammar,
    Regex,
    written_grammar,
)
from quantd.daemon.grammar_check import GrammarChecker
from quantd.engine.errors import RequestError

TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer"
VOCAB_SIZE = 512

# As llama.cpp's own grammars/json.gbnf, and much like its arithmetic.gbnf.
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC_GBNF = r"""
root  ::= (expr "=" ws num "\n")+
expr  ::= term ([-+*/] ws term)*
term  ::= ident ws | num ws | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]*
num   ::= [0-9]+
ws    ::= " "*
"""
ODD_TEXTS = ["é😀", '"', "\\", "\n", "\x00", "\x7f", "<x>", "a/b"]


@pytest.mark.parametrize(
    ("constraint", "accepted", "refused"),
    [
        (Regex(r"\d{3}-[a-z]+", "regex"), ["123-ab"], ["123-", "x123-ab", "123-ab "]),
        (Regex("^a/b|c\\/d$", "regex"), ["a/b", "c/d"], ["a/bc", "c\\/d"]),
        (Regex("(?i)yes\nno", "regex"), ["YES\nno"], ["yesno"]),
        (Regex("", "regex"), [""], ["a"]),
        (Choice(["yes", "no", "yes sir"], "choice"), ["yes", "no", "yes sir"], ["", "yes ", "maybe"]),
        (Choice(ODD_TEXTS, "choice"), ODD_TEXTS, [""]),
        (Choice([str(i) for i in range(9000)], "choice"), ["0", "8999"], ["9000", "00"]),
        (GbnfGrammar(JSON_GBNF, "grammar"), ['{"a": [1, "\\u00e9", {}]}', "{}"], ["[]", '{"a":}']),
        (GbnfGrammar(ARITHMETIC_GBNF, "grammar"), ["(a_1+ 1) *2= 3\n"], ["a=\n", "1+=1\n"]),
        (GbnfGrammar(r'root ::= "\u0041\x42" [\u0043-\U0001F600\-]', "grammar"), ["AB-", "ABé"], ["ABB"]),
        (GbnfGrammar(r'root ::= "\\u0041" [\]\[]', "grammar"), [r"\u0041]"], ["A]"]),
        (LarkGrammar('start: "a" b+\nb: /[0-9]/', "grammar"), ["a12"], ["a"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_answers_are_what_is_asked_for(
    constraint: Constraint, accepted: list[str], refused: list[str]
) -> None:
    grammar = constraint.grammar()
    assert [takes(grammar, text) for text in accepted] == [True] * len(accepted)
    assert [takes(grammar, text) for text in refused] == [False] * len(refused)


def test_a_regular_expression_stays_one() -> None:
    """It cannot add rules to the grammar around it."""
    assert compiled(Regex("a/\nstart: /b", "regex").grammar()).is_error() is False
    assert not takes(Regex("a/\nstart: /b", "regex").grammar(), "b")
    assert compiled(Regex("a\\", "regex").grammar()).is_error()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('start: "a"', LarkGrammar),
        ('%llguidance {}\nstart[capture]: "a"', LarkGrammar),
        ('// rules\n  start : "a"', LarkGrammar),
        ('root ::= "a"', GbnfGrammar),
        ('start ::= "b"\nroot ::= start', GbnfGrammar),
    ],
)
def test_a_written_grammar_is_told_by_its_form(text: str, kind: type) -> None:
    assert type(written_grammar(text, "grammar")) is kind


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Choice([], "choice"), "nothing to choose"),
        (GbnfGrammar('rule ::= "a"', "grammar"), "root"),
        (GbnfGrammar("root ::= other", "grammar"), "other"),
        (GbnfGrammar("root ::= [a", "grammar"), "Unexpected end"),
        (GbnfGrammar(r'root ::= "\U00110000"', "grammar"), "U00110000"),
        (GbnfGrammar("root ::= " + "(" * 5000, "grammar"), "recursion"),
        (GbnfGrammar("root ::= " + '"a" ' * 20000, "grammar"), "at most"),
    ],
)
def test_what_is_no_constraint_is_refused(constraint: Constraint, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        constraint.grammar()
    assert refused.value.param == constraint.param


@asynccontextmanager
async def checking(seconds: float = 60.0) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(seconds)
    try:
        yield checker
    finally:
        await checker.close()


async def refusal(checker: GrammarChecker, grammar: str, folder: Path = TOKENIZER) -> str | None:
    try:
        await checker.check(grammar, folder, VOCAB_SIZE, "response_format")
    except RequestError as error:
        assert error.param == "response_format"
        return str(error)
    return None


def workers() -> list[psutil.Process]:
    """Processes that check grammars for this one."""
    children = psutil.Process().children()
    return [child for child in children if "quantd.daemon.grammar_worker" in child.cmdline()]


@in_loop
async def test_a_grammar_is_tried_as_the_engine_will_use_it(tmp_path: Path) -> None:
    async with checking() as checker:
        assert workers() == []
        assert await refusal(checker, 'start: "a" <s>') is None
        assert "nope" in str(await refusal(checker, "start: <nope>"))
        unknown = JsonSchema({"format": "nope"}, "response_format").grammar()
        assert str(await refusal(checker, unknown)).endswith("Unknown format: nope")
        assert "tokenizer.json" in str(await refusal(checker, 'start: "a"', tmp_path))
        assert await refusal(checker, 'start: "a" <s>') is None
        assert len(workers()) == 1
    assert workers() == []


def endless_chain(length: int) -> str:
    """Rules that refer to each other so deep that a compiler's stack does not suffice."""
    rules = [f"a{i}: a{i + 1} a{i + 1}" for i in range(length)]
    return "\n".join(["start: a0", *rules, f'a{length}: "x"'])


@in_loop
async def test_a_grammar_that_ends_the_process_is_refused_and_others_go_on() -> None:
    async with checking() as checker:
        hostile = [asyncio.create_task(refusal(checker, endless_chain(25_000))) for _ in range(2)]
        good = asyncio.create_task(refusal(checker, 'start: "a"'))
        for task in hostile:
            assert "too large or too deeply nested" in str(await task)
        assert await good is None


@in_loop
async def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on() -> None:
    async with checking(seconds=1.0) as checker:
        slow = JsonSchema({"type": "integer", "multipleOf": 999_983}, "response_format").grammar()
        assert "longer than 1 s" in str(await refusal(checker, slow))
        checker._seconds = 60.0
        assert await refusal(checker, 'start: "a"') is None


@in_loop
async def test_who_leaves_while_waiting_takes_nobody_s_answer() -> None:
    async with checking() as checker:
        waiting = [asyncio.create_task(refusal(checker, f"start: <no{i}>")) for i in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        assert "no0" in str(await waiting[0])
        assert "no2" in str(await waiting[2])
        assert await refusal(checker, 'start: "a"') is None


@in_loop
async def test_a_process_that_ends_at_once_is_a_refusal() -> None:
    checker = GrammarChecker(command=(sys.executable, "-c", "pass"))
    assert "too large" in str(await refusal(checker, 'start: "a"'))
    await checker.close()


@in_loop
async def test_a_hostile_schema_is_a_400_and_the_daemon_lives() -> None:
    """References so long that compiling them ends the process that does."""
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(9000)} | {"d9000": {}}
    schema = {"$defs": chain, "$ref": "#/$defs/d0"}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    async with running_daemon() as daemon:
        status, answer = await daemon.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "response_format")
        status, _ = await daemon.post("/v1/chat/completions", {"messages": body["messages"], "max_tokens": 1})
        assert status == 200
