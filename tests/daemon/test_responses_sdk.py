"""The Responses of the official `openai` package against the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from agent_engine import TEMPLATE, be_an_agent, last_grammar, last_prompt, say
from daemon_in_loop import Daemon, in_loop, running_daemon
from test_openai_sdk import async_client, with_sync
from waiting import until_so

from quantd.daemon.wire.stream import Timing

HI: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 9}


@contextlib.asynccontextmanager
async def daemon_and_client(
    transport: str = "unix", **daemon: Any
) -> AsyncIterator[tuple[Daemon, openai.AsyncOpenAI]]:
    async with running_daemon(**daemon) as running, async_client(running, transport) as client:
        yield running, client


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_whole_and_streamed(transport: str) -> None:
    async def talk() -> None:
        async with daemon_and_client(transport) as (daemon, client):
            cut = await client.responses.create(**HI)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert cut._request_id.startswith("req_") and cut.usage.output_tokens == 9
            say(daemon, "Good day.")
            whole = await client.responses.create(**HI | {"max_output_tokens": None})
            assert (whole.status, whole.output_text) == ("completed", "Good day.")
            async with client.responses.stream(model="tiny", input="hi") as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert final.output_text == "Good day." and final.usage == whole.usage
            deltas = [event for event in events if event.type == "response.output_text.delta"]
            assert deltas[-1].snapshot == "".join(event.delta for event in deltas) == "Good day."
            raw = await client.responses.create(model="tiny", input="hi", stream=True)
            numbers = [event.sequence_number async for event in raw]
            assert numbers == list(range(len(events)))
            counted = await client.responses.input_tokens.count(model="tiny", input="hi")
            assert counted.input_tokens == whole.usage.input_tokens

    in_loop(talk)()


@in_loop
async def test_sync_client() -> None:
    def talk(client: openai.OpenAI) -> tuple[str, str]:
        whole = client.responses.create(**HI)
        with client.responses.stream(model="tiny", input="hi", max_output_tokens=9) as stream:
            *_, last = stream
        return whole.output_text, last.response.output_text

    async with running_daemon() as daemon:
        first, second = await with_sync(daemon, "tcp", talk)
        assert first == second != ""


@in_loop
async def test_state() -> None:
    async with daemon_and_client() as (daemon, client):
        first = await client.responses.create(**HI)
        assert await client.responses.retrieve(first.id) == first
        second = await client.responses.create(**HI, previous_response_id=first.id)
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.id for item in items[1:2]] == [first.output[0].id] and len(items) == 3
        async with client.responses.stream(**HI, previous_response_id=second.id) as stream:
            *_, last = [event async for event in stream]
        assert (await client.responses.retrieve(last.response.id)).output == last.response.output
        whole: Any = [*items, *second.output, {"role": "user", "content": "hi"}]
        again = await client.responses.create(**HI | {"input": whole})
        assert daemon.engine.seen[-1].prompt == daemon.engine.seen[-2].prompt
        await client.responses.delete(again.id)
        unstored = await client.responses.create(**HI, store=False)
        for id in (again.id, unstored.id, "resp_no"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(id)
        with pytest.raises(openai.BadRequestError) as missing:
            await client.responses.create(**HI, previous_response_id=again.id)
        assert missing.value.code == "previous_response_not_found"


@in_loop
async def test_background_and_cancel() -> None:
    async with daemon_and_client() as (daemon, client):
        done = await client.responses.create(**HI)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(done.id)
        daemon.engine.gate.clear()
        begun = await client.responses.create(**HI, background=True)
        assert begun.status == "in_progress"
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        await daemon.settle()
        daemon.engine.gate.set()
        begun = await client.responses.create(**HI, background=True)
        await daemon.service.wait_idle()
        assert (await client.responses.retrieve(begun.id)).output[0].content == done.output[0].content


@in_loop
async def test_a_stream_in_the_background_is_gone_on_with() -> None:
    """By several readers, while it runs and when it is over; the answer goes on without any."""
    async with daemon_and_client() as (daemon, client):
        await client.responses.create(**HI)
        daemon.engine.gate.clear()
        asked = HI | {"background": True, "stream": True}
        async with await client.responses.create(**asked) as stream:
            created = await anext(stream)
        id = created.response.id
        assert (created.type, created.sequence_number) == ("response.created", 0)
        late = await client.responses.retrieve(id, stream=True, starting_after=0)
        assert (await anext(late)).type == "response.in_progress"
        daemon.engine.gate.set()
        events = [event async for event in late]
        assert [event.sequence_number for event in events] == list(range(2, len(events) + 2))
        assert events[-1].response == await client.responses.retrieve(id)
        again = await client.responses.retrieve(id, stream=True)
        assert [event async for event in again][2:] == events
        rest = await client.responses.retrieve(id, stream=True, starting_after=len(events))
        assert [event async for event in rest] == events[-1:]


@in_loop
async def test_a_stream_of_a_cancelled_response_ends() -> None:
    async with daemon_and_client() as (daemon, client):
        await client.responses.create(**HI)
        daemon.engine.gate.clear()
        stream = await client.responses.create(**HI, background=True, stream=True)
        created = await anext(stream)
        await client.responses.cancel(created.response.id)
        assert [event.type async for event in stream] == ["response.in_progress"]
        again = await client.responses.retrieve(created.response.id, stream=True)
        assert [event.type async for event in again] == ["response.created", "response.in_progress"]


@in_loop
async def test_log_probabilities_are_those_of_chats() -> None:
    """Of the text alone, whole, in its deltas, and at its end."""
    async with daemon_and_client() as (daemon, client):
        await daemon.service.load("tiny")
        say(daemon, "Good day.")
        messages = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=2
        )
        expected = [entry.to_dict() for entry in chat.choices[0].logprobs.content]
        assert len(expected) > 3 and len(expected[0]["top_logprobs"]) == 2
        asked = {"model": "tiny", "input": "hi", "include": ["message.output_text.logprobs"]}
        whole = await client.responses.create(**asked, top_logprobs=2)
        assert [entry.to_dict() for entry in whole.output[0].content[0].logprobs] == expected
        stream = await client.responses.create(**asked, top_logprobs=2, stream=True)
        events = [event async for event in stream]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [entry.to_dict() for event in deltas for entry in event.logprobs] == expected
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [entry.to_dict() for entry in done.logprobs] == expected
        assert events[-1].response.output[0].content == whole.output[0].content
        bare = await client.responses.create(**asked)
        assert [entry.top_logprobs for entry in bare.output[0].content[0].logprobs] == [[]] * len(expected)
        assert not (await client.responses.create(model="tiny", input="hi")).output[0].content[0].logprobs


@in_loop
async def test_errors_as_the_sdk_sees_them() -> None:
    async with daemon_and_client("tcp") as (daemon, client):
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(**HI | {"model": "nosuch"})
        assert gone.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(**HI, temperature=-1)
        assert bad.value.param == "temperature"
        long = HI | {"input": "x " * 600}
        with pytest.raises(openai.BadRequestError) as overflow:
            await client.responses.create(**long)
        assert overflow.value.code == "context_length_exceeded"
        events = [event async for event in await client.responses.create(**long, stream=True)]
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        assert events[-1].response.error.code == "context_length_exceeded"
        stream = await client.responses.create(**HI, stream=True)
        assert (await anext(stream)).type == "response.created"
        daemon.engine.died.set_result("the engine process was ended by SIGKILL")
        last = [event async for event in stream][-1]
        assert last.type == "response.failed" and "SIGKILL" in last.response.error.message
        assert (await client.responses.retrieve(last.response.id)).status == "failed"


@in_loop
async def test_closing_a_stream_ends_the_work() -> None:
    async with daemon_and_client("tcp") as (daemon, client):
        async with client.responses.stream(**HI | {"max_output_tokens": 400}) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            daemon.engine.gate.clear()
        await daemon.settle()
        assert daemon.engine.aborted


@in_loop
async def test_signs_of_life_are_events() -> None:
    """Codex counts only those when it waits."""
    async with daemon_and_client("tcp", timing=Timing(ping_seconds=0.01)) as (daemon, client):
        daemon.engines.release = asyncio.Event()
        async with client.responses.stream(**HI) as stream:
            kinds = [(await anext(stream)).type for _ in range(4)]
            assert kinds == ["response.created", *["response.in_progress"] * 3]
            daemon.engines.release.set()
            await until_so(lambda: daemon.engines.started)
            rest = [event.type async for event in stream]
        assert rest[-1] == "response.incomplete" and "response.created" not in rest


GAUGE: Any = {
    "type": "function",
    "name": "read_gauge",
    "description": "Reads a gauge.",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "strict": False,
}


@pytest.mark.parametrize("stored", [False, True])
def test_a_tool_loop_with_reasoning(stored: bool) -> None:
    """With all items sent again, and with the earlier response named."""

    async def talk() -> None:
        async with daemon_and_client(template=TEMPLATE) as (daemon, client):
            await client.responses.create(**HI)
            be_an_agent(daemon)
            question: Any = {"role": "user", "content": "How is gauge 4?"}
            async with client.responses.stream(model="tiny", input=[question], tools=[GAUGE]) as stream:
                first = await stream.get_final_response()
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
            reasoning, _, call = first.output
            assert reasoning.content[0].text == "Let me look." and reasoning.summary == []
            assert (call.name, json.loads(call.arguments)) == ("read_gauge", {"n": 4})
            assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 bar"}
            before: Any = {"previous_response_id": first.id, "input": [result]}
            if not stored:
                before = {"input": [question, *first.output, result]}
            last = await client.responses.create(
                model="tiny", tools=[GAUGE], reasoning={"summary": "auto"}, **before
            )
            assert last.output_text == "It is 12 bar." and last.output[0].summary[0].text == "So."
            assert '](Let me look.)I look.read_gauge{"n": 4}[tool]12 bar[{' in last_prompt(daemon)

    in_loop(talk)()


class City(pydantic.BaseModel):
    name: str
    people: int


@in_loop
async def test_structured_output() -> None:
    async with daemon_and_client() as (daemon, client):
        await client.responses.create(**HI)
        say(daemon, '{"name":"Oslo","people":7}')
        parsed = await client.responses.parse(model="tiny", input="hi", text_format=City)
        assert parsed.output_parsed == City(name="Oslo", people=7)
        async with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
            assert (await stream.get_final_response()).output_parsed == parsed.output_parsed
        schema = City.model_json_schema()
        json_schema: Any = {"name": "city", "schema": schema}
        chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        for format, response_format in (
            ({"type": "json_schema", **json_schema}, {"type": "json_schema", "json_schema": json_schema}),
            ({"type": "json_object"}, {"type": "json_object"}),
        ):
            await daemon.post("/v1/chat/completions", chat | {"response_format": response_format})
            expected = last_grammar(daemon)
            await client.responses.create(model="tiny", input="hi", text={"format": format})
            assert last_grammar(daemon) == expected is not None
        unenforceable: Any = {"type": "json_schema", "name": "n", "schema": {"not": schema}}
        with pytest.raises(openai.BadRequestError, match="not") as refused:
            await client.responses.create(model="tiny", input="hi", text={"format": unenforceable})
        assert refused.value.param == "text.format"


@in_loop
async def test_forced_tools_have_the_rules_that_chats_have() -> None:
    tools: Any = [GAUGE | {"name": name} for name in "ab"]
    names = ("name", "description", "parameters", "strict")
    functions = [{"type": "function", "function": {name: tool[name] for name in names}} for tool in tools]
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": functions}
    async with daemon_and_client(template=TEMPLATE) as (daemon, client):
        for fields, chats in (
            ({}, {}),
            ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
            ({"tool_choice": "required"}, {"tool_choice": "required"}),
            ({"tool_choice": {"type": "function", "name": "b"}}, {"tool_choice": functions[1]}),
            ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ):
            await daemon.post("/v1/chat/completions", chat | chats)
            expected = last_grammar(daemon), last_prompt(daemon)
            await client.responses.create(model="tiny", input="hi", tools=tools, **fields)
            assert (last_grammar(daemon), last_prompt(daemon)) == expected
            assert (expected[0] is None) == (fields.get("tool_choice") == "none")
