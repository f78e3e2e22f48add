"""Tools and reasoning on OpenAI's chat: requests, whole answers and streams alike, and the SDK's helpers."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from agent_engine import TEMPLATE
from daemon_in_loop import Daemon, in_loop, running_daemon
from test_openai import CHAT, chunks_of, refused
from test_openai_sdk import async_client
from waiting import until_so

QUESTION: list[Any] = [{"role": "user", "content": "How is gauge 4?"}]


class ReadGauge(pydantic.BaseModel):
    """Reads a gauge."""

    n: int
    unit: Literal["bar", "psi"]


TOOL: Any = openai.pydantic_function_tool(ReadGauge, name="read_gauge")
CALL = '<tool_call>\n{"name": "read_gauge", "arguments": {"n": 4, "unit": "bar"}}\n</tool_call>'
ANSWER = "<think>\nLet me look.\n</think>\n\nI look.\n" + CALL
BODY = {"model": "tiny", "messages": QUESTION, "tools": [TOOL]}


async def saying(daemon: Daemon, text: str) -> None:
    """Make the engine, which this starts, say a text and end."""
    await daemon.post(CHAT, {"messages": QUESTION, "max_tokens": 1})
    tokenizer = daemon.service.models.entries[0].model.tokenizer
    ids = [*tokenizer.encode(text), 2]
    daemon.engine.script = lambda request: ids


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def grammar_of(daemon: Daemon) -> str | None:
    return daemon.engine.seen[-1].sampling.grammar


@in_loop
async def test_an_answer_with_reasoning_content_and_a_call() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        await saying(daemon, ANSWER)
        status, reply = await daemon.post(CHAT, BODY)
        assert status == 200
        (choice,) = reply["choices"]
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"] == "Let me look."
        assert message["content"] == "I look." and choice["finish_reason"] == "tool_calls"
        (call,) = message["tool_calls"]
        assert call["id"].startswith("call_") and len(call["id"]) == 29 and call["type"] == "function"
        assert call["function"] == {"name": "read_gauge", "arguments": '{"n": 4, "unit": "bar"}'}
        thoughts = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < thoughts < reply["usage"]["completion_tokens"]

        chunks = chunks_of(await daemon.stream(CHAT, BODY | {"stream": True}))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me look."
        assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
        assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
        opened, *parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert opened == {
            "index": 0,
            "id": opened["id"],
            "type": "function",
            "function": {"name": "read_gauge", "arguments": ""},
        }
        assert all(part.keys() == {"index", "function"} for part in parts) and len(parts) > 3
        assert "".join(part["function"]["arguments"] for part in parts) == '{"n": 4, "unit": "bar"}'
        assert chunks[-1]["choices"][0] | {"logprobs": None} == {
            "index": 0,
            "delta": {},
            "finish_reason": "tool_calls",
            "logprobs": None,
        }


@in_loop
async def test_calls_alone_have_no_content_and_a_named_function_no_reason_of_its_own() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        await saying(daemon, f"\n{CALL}\n{CALL}\n")
        reasons = [("auto", "tool_calls"), ("required", "tool_calls"), (named("read_gauge"), "stop")]
        for choice, reason in reasons:
            _, reply = await daemon.post(CHAT, BODY | {"tool_choice": choice})
            assert reply["choices"][0]["finish_reason"] == reason
            assert reply["choices"][0]["message"]["content"] is None
            first, second = reply["choices"][0]["message"]["tool_calls"]
            assert first["function"] == second["function"] and first["id"] != second["id"]
            chunks = chunks_of(await daemon.stream(CHAT, BODY | {"tool_choice": choice, "stream": True}))
            assert chunks[-1]["choices"][0]["finish_reason"] == reason
            assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


@in_loop
async def test_what_reaches_the_engine() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        await saying(daemon, "So.")
        tools = [TOOL, named("other")]
        grammars = {}
        for name, fields in {
            "nothing": {"tools": None},
            "none": {"tool_choice": "none"},
            "auto": {},
            "null": {"tool_choice": None, "parallel_tool_calls": None},
            "required": {"tool_choice": "required"},
            "one": {"tool_choice": "required", "parallel_tool_calls": False},
            "named": {"tool_choice": named("other")},
            "allowed": {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [named("read_gauge")]},
                }
            },
        }.items():
            status, reply = await daemon.post(CHAT, BODY | {"tools": tools} | fields)
            assert status == 200, reply
            grammars[name] = grammar_of(daemon)
        assert grammars["nothing"] is grammars["none"] is None
        assert grammars["auto"] == grammars["null"] and grammars["required"] != grammars["one"]
        assert "read_gauge" not in grammars["named"] and "other" in grammars["named"]
        assert "read_gauge" in grammars["allowed"] and "other" not in grammars["allowed"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nosuch"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def post() -> None:
        async with running_daemon(template=TEMPLATE) as daemon:
            await refused(daemon, CHAT, BODY | fields, param)

    in_loop(post)()


SWITCH = (
    "{{ messages[0].content }} {{ enable_thinking is defined and enable_thinking }} {{ reasoning_effort }}"
)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "hi False"),
        ({"reasoning_effort": "none"}, "hi False none"),
        ({"reasoning_effort": "low"}, "hi True low"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "hi True"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, "hi False high"),
    ],
)
def test_reasoning_is_asked_for_or_not(fields: dict[str, Any], shown: str) -> None:
    async def post() -> None:
        async with running_daemon(template=SWITCH) as daemon:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields
            assert (await daemon.post(CHAT, body))[0] == 200
            model = daemon.service.models.entries[0].model
            assert model.tokenizer.decode(daemon.engine.seen[0].prompt).strip() == shown

    in_loop(post)()


@in_loop
async def test_stop_strings_end_content_and_nothing_else() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        await saying(daemon, ANSWER)
        _, reply = await daemon.post(CHAT, BODY | {"stop": ["look.", "bar"]})
        message = reply["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Let me look.", "I ")
        assert "tool_calls" not in message and reply["choices"][0]["finish_reason"] == "stop"
        _, reply = await daemon.post(CHAT, BODY | {"stop": ["\n", "bar"]})
        assert reply["choices"][0]["message"]["content"] == "I look."
        assert json.loads(reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["n"] == 4


@in_loop
async def test_a_budget_that_ends_in_reasoning() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        await saying(daemon, ANSWER)
        _, reply = await daemon.post(CHAT, BODY | {"max_tokens": 8})
        message = reply["choices"][0]["message"]
        assert message["content"] == "" and message["reasoning"].startswith("Let")
        assert reply["choices"][0]["finish_reason"] == "length"
        # The opening tag takes some tokens.
        assert 4 <= reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 8


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_the_sdks_helpers(transport: str) -> None:
    async def talk() -> None:
        async with running_daemon(template=TEMPLATE) as daemon, async_client(daemon, transport) as client:
            await saying(daemon, ANSWER)
            whole = await client.chat.completions.parse(model="tiny", messages=QUESTION, tools=[TOOL])
            (call,) = whole.choices[0].message.tool_calls or ()
            assert call.function.parsed_arguments == ReadGauge(n=4, unit="bar")
            async with client.chat.completions.stream(
                model="tiny", messages=QUESTION, tools=[TOOL], stream_options={"include_usage": True}
            ) as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_completion()
            assert {"content.delta", "tool_calls.function.arguments.done"} <= kinds
            (streamed,) = final.choices[0].message.tool_calls or ()
            assert streamed.function == call.function and streamed.index == 0
            assert final.usage == whole.usage

    in_loop(talk)()


@in_loop
async def test_a_tool_loop_with_the_sdk() -> None:
    async with running_daemon(template=TEMPLATE) as daemon, async_client(daemon, "unix") as client:
        await saying(daemon, ANSWER)
        reply = await client.chat.completions.create(model="tiny", messages=QUESTION, tools=[TOOL])
        message = reply.choices[0].message
        assert message.tool_calls
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 bar"}
        again: Any = [*QUESTION, message, result]
        await client.chat.completions.create(model="tiny", messages=again, tools=[TOOL])
        model = daemon.service.models.entries[0].model
        prompt = model.tokenizer.decode(daemon.engine.seen[-1].prompt)
        assert '(Let me look.)I look.read_gauge{"n": 4, "unit": "bar"}' in prompt and "12 bar" in prompt


@in_loop
async def test_a_client_that_leaves_ends_forced_calls_too() -> None:
    async with running_daemon(template=TEMPLATE) as daemon, async_client(daemon, "unix") as client:
        await saying(daemon, "x" * 400)
        daemon.engine.gate.clear()
        task = asyncio.ensure_future(
            client.chat.completions.create(
                model="tiny", messages=QUESTION, tools=[TOOL], tool_choice="required"
            )
        )
        await until_so(lambda: daemon.engine.running)
        task.cancel()
        await daemon.settle()
        assert daemon.engine.aborted
