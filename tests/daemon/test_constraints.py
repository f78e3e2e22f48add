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
from processes import children_of
from waiting import until_so

from quantd.daemon.constraints import (
    Choice,
    Constraint,
    GbnfGrammar,
    JsonSchema,
    LarkGrammar,
    Regex,
    written_grammar,
)
from quantd.daemon.errors import OverloadedError
from quantd.daemon.grammar_check import CheckLimits, GrammarChecker
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
async def checking(**limits: float) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(CheckLimits(**{"check_seconds": 60.0} | limits))
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
    return children_of(psutil.Process(), "quantd.daemon.grammar_worker")


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


SLOW = [
    JsonSchema({"type": "integer", "multipleOf": number}, "response_format").grammar()
    for number in (999_983, 999_979, 999_961)
]


@in_loop
async def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on() -> None:
    async with checking(check_seconds=1.5) as checker:
        slow = [asyncio.create_task(refusal(checker, SLOW[0])) for _ in range(3)]
        good = asyncio.create_task(refusal(checker, 'start: "a"'))
        for task in slow:
            assert "longer than 1.5 s" in str(await task)
        assert await good is None


@in_loop
async def test_what_took_too_long_is_tried_again_after_a_while() -> None:
    async with checking(check_seconds=1.0, refused_seconds=0.0) as checker:
        assert "longer than 1 s" in str(await refusal(checker, SLOW[0]))
        again = asyncio.create_task(refusal(checker, SLOW[0]))
        await new_worker()
        assert "longer than 1 s" in str(await again)


@in_loop
async def test_nobody_waits_without_end_for_others_grammars() -> None:
    async with checking(check_seconds=3.0, wait_seconds=0.5) as checker:
        first = asyncio.create_task(refusal(checker, SLOW[0]))
        await asyncio.sleep(0)
        for task in [asyncio.create_task(refusal(checker, slow)) for slow in SLOW[1:]]:
            with pytest.raises(OverloadedError):
                await task
        first.cancel()
        await asyncio.wait({first})


async def all_end() -> None:
    """Wait until there is no process."""
    await until_so(lambda: not workers())


async def new_worker() -> psutil.Process:
    """The process, once there is one."""
    await until_so(lambda: workers())
    return workers()[0]


@in_loop
async def test_a_process_that_is_killed_in_the_middle_of_a_check_is_started_again() -> None:
    async with checking() as checker:
        task = asyncio.create_task(refusal(checker, 'start: "a"'))
        killed = await new_worker()
        killed.kill()
        assert await task is None
        assert workers() != [killed]
        workers()[0].kill()
        assert await refusal(checker, 'start: "b"') is None


@in_loop
async def test_what_is_known_needs_no_process_and_goes_with_its_model() -> None:
    async with checking() as checker:
        for grammar in ('start: "a"', "start: <nope>"):
            first = await refusal(checker, grammar)
            workers()[0].suspend()
            assert await refusal(checker, grammar) == first
            workers()[0].resume()
        checker.forget(Path("elsewhere"))
        await all_end()
        assert await refusal(checker, 'start: "a"') is None
        assert workers() == []
        checker.forget(TOKENIZER)
        assert await refusal(checker, 'start: "a"') is None
        assert len(workers()) == 1


@in_loop
async def test_an_idle_process_ends() -> None:
    async with checking(idle_seconds=0.3) as checker:
        assert await refusal(checker, 'start: "a"') is None
        assert len(workers()) == 1
        await all_end()
        assert await refusal(checker, 'start: "b"') is None


@in_loop
async def test_who_leaves_takes_nobody_s_answer() -> None:
    """Neither one who waits nor one whose check is under way."""
    async with checking() as checker:
        tasks = [asyncio.create_task(refusal(checker, f"start: <no{i}>")) for i in range(4)]
        tasks[1].cancel()
        await new_worker()
        tasks[0].cancel()
        assert "no2" in str(await tasks[2])
        assert "no3" in str(await tasks[3])


@in_loop
async def test_a_process_that_ends_at_once_is_a_refusal() -> None:
    checker = GrammarChecker(command=(sys.executable, "-c", "pass"))
    assert "too large" in str(await refusal(checker, 'start: "a"'))
    await checker.close()


@in_loop
async def test_the_last_model_that_goes_takes_the_process_along() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    async with running_daemon() as daemon:
        assert (await daemon.post("/v1/chat/completions", body | {"max_tokens": 1}))[0] == 200
        assert len(workers()) == 1
        await daemon.post("/quantd/unload", {"model": "tiny"})
        await all_end()


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
