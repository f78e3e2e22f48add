"""What OpenAI's requests say of an answer's form, in every field for it: grammars at the engine, refusals."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import openai
import pydantic
import pytest
from agent_engine import TEMPLATE
from daemon_in_loop import in_loop, running_daemon
from fake_models import chat_tokenizer
from test_openai import CHAT, COMPLETIONS, refused
from test_openai_sdk import async_client
from test_openai_tools import CALL, TOOL, saying

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"name": "x", "schema": SCHEMA, "strict": True}
YES_OR_NO = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"\n'

# Fields of a request, an answer that they allow, and one that they do not.
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, '{"b": [1]}', "[1]"),
    "json_object with a schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        '{"a": 1}',
        '{"b": 1}',
    ),
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, '{"a": 1}', "{}"),
    "not strict": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        '{"a": 1}',
        "{}",
    ),
    "llama-server's schema": ({"json_schema": SCHEMA}, '{"a": 1}', "{}"),
    "llama-server's grammar": ({"grammar": YES_OR_NO}, "yes", "maybe"),
    "Lark": ({"grammar": LARK}, "no", "maybe"),
    "vLLM's json": ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', "{}"),
    "vLLM's json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', "{}"),
    "vLLM's json_object": ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    "vLLM's regex": ({"structured_outputs": {"regex": "[a-c]+"}}, "abc", "abd"),
    "vLLM's choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    "vLLM's grammar": ({"structured_outputs": {"grammar": YES_OR_NO}}, "yes", "maybe"),
    "guided_json": ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
    "guided_regex": ({"guided_regex": "[a-c]+"}, "abc", "abd"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    "guided_grammar": ({"guided_grammar": YES_OR_NO}, "yes", "maybe"),
}
MASKS = llguidance.LLTokenizer(chat_tokenizer().to_str())


def allows(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(MASKS, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(chat_tokenizer().encode(text).ids) and matcher.is_accepting()


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_field_becomes_the_engines_grammar(path: str) -> None:
    async def post() -> None:
        async with running_daemon() as daemon:
            for name, (fields, good, bad) in FORMS.items():
                status, reply = await daemon.post(path, BODIES[path] | fields | {"max_tokens": 2})
                assert status == 200, (name, reply)
                grammar = daemon.engine.seen[-1].sampling.grammar
                assert grammar is not None and allows(grammar, good) and not allows(grammar, bad), name

    in_loop(post)()


NOTHING: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"response_format": None, "grammar": None, "json_schema": None, "structured_outputs": None},
    {"grammar": "", "structured_outputs": {}},
    {"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None},
]


@pytest.mark.parametrize("fields", NOTHING)
def test_no_form(fields: dict[str, Any]) -> None:
    async def post() -> None:
        async with running_daemon() as daemon:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert (await daemon.post(CHAT, body | fields))[0] == 200
            assert daemon.engine.seen[0].sampling.grammar is None

    in_loop(post)()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
    ),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_object"}, "grammar": LARK}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "response_format"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"json_schema": {"not": {"type": "string"}}}, "json_schema"),
    ({"grammar": "root = x"}, "grammar"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def post() -> None:
        async with running_daemon() as daemon:
            await refused(daemon, CHAT, {"messages": [{"role": "user", "content": "hi"}]} | fields, param)

    in_loop(post)()


@in_loop
async def test_a_form_beside_tools_and_behind_reasoning() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        await saying(daemon, '<think>\nSo.\n</think>\n\n{"a": 1}')
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
        form = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
        _, reply = await daemon.post(CHAT, body | form)
        message = reply["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("So.", '{"a": 1}')
        grammar = daemon.engine.seen[-1].sampling.grammar
        assert grammar is not None
        assert allows(grammar, '{"a": 1}') and allows(grammar, '<think>\nSo {.\n</think>\n\n{"a": 1}')
        assert allows(grammar, CALL) and allows(grammar, "<think>So.</think>\n\n" + CALL)
        assert not allows(grammar, "So.") and not allows(grammar, "<think>\nSo.\n</think>\n\nSo.")


class Weather(pydantic.BaseModel):
    a: int


@in_loop
async def test_the_sdk_parses_what_it_asked_for() -> None:
    async with running_daemon() as daemon, async_client(daemon, "unix") as client:
        await saying(daemon, '{"a": 12}')
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.parse(model="tiny", messages=messages, response_format=Weather)
        assert whole.choices[0].message.parsed == Weather(a=12)
        async with client.chat.completions.stream(
            model="tiny", messages=messages, response_format=Weather
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Weather(a=12)
        with pytest.raises(openai.BadRequestError, match="not"):
            await client.chat.completions.create(
                model="tiny",
                messages=messages,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}},
                },
            )
