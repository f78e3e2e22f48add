"""The official `anthropic` package against the daemon, over TCP and over the Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx2
import pydantic
import pytest
from agent_engine import TEMPLATE, be_an_agent, last_grammar, last_prompt, say
from daemon_in_loop import Daemon, in_loop, running_daemon
from waiting import until_so

from quantd.daemon.wire.stream import Timing

HI: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}


@contextlib.asynccontextmanager
async def daemon_and_client(
    transport: str = "unix", **daemon: Any
) -> AsyncIterator[tuple[Daemon, anthropic.AsyncAnthropic]]:
    async with running_daemon(**daemon) as running:
        options: dict[str, Any] = {"base_url": f"http://127.0.0.1:{running.port}", "api_key": "any"}
        if transport == "unix":
            uds = httpx2.AsyncHTTPTransport(uds=str(running.path))
            http_client = anthropic.DefaultAsyncHttpxClient(transport=uds)
            options = {"base_url": "http://quantd", "auth_token": "any", "http_client": http_client}
        async with anthropic.AsyncAnthropic(max_retries=0, **options) as client:
            yield running, client


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_whole_and_streamed(transport: str) -> None:
    async def talk() -> None:
        async with daemon_and_client(transport) as (_, client):
            for namespace in (client.messages, client.beta.messages):
                whole = await namespace.create(**HI)
                assert whole._request_id.startswith("req_") and whole.stop_reason == "max_tokens"
                async with namespace.stream(**HI) as stream:
                    text = "".join([part async for part in stream.text_stream])
                    streamed = await stream.get_final_message()
                assert text == whole.content[0].text == "user\nhi\nassistant\n"[: len(text)]
                assert streamed.content[0].text == text and streamed.usage == whole.usage
                raw = await namespace.create(**HI, stream=True)
                assert [event.type async for event in raw][-2:] == ["message_delta", "message_stop"]
                counted = await namespace.count_tokens(model="tiny", messages=HI["messages"])
                assert counted.input_tokens == whole.usage.input_tokens

    in_loop(talk)()


def test_sync_client() -> None:
    def talk(port: int) -> Iterator[str]:
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="any", max_retries=0) as client:
            yield client.messages.create(**HI).content[0].text
            with client.messages.stream(**HI) as stream:
                yield stream.get_final_text()

    async def both() -> None:
        async with running_daemon() as daemon:
            first, second = await asyncio.to_thread(lambda: list(talk(daemon.port)))
            assert first == second

    in_loop(both)()


@in_loop
async def test_cached_tokens_where_the_client_asks_for_caching() -> None:
    async with daemon_and_client() as (_, client):
        plain = (await client.messages.create(**HI)).usage
        mark: Any = {"type": "ephemeral"}
        block = {"type": "text", "text": "hi", "cache_control": mark}
        bodies = ({"cache_control": mark}, {"messages": [{"role": "user", "content": [block]}]})
        for body in bodies:
            usage = (await client.messages.create(**HI | body)).usage
            assert plain.cache_read_input_tokens == 0 < usage.cache_read_input_tokens
            assert usage.input_tokens + usage.cache_read_input_tokens == plain.input_tokens
            async with client.messages.stream(**HI | body) as stream:
                assert (await stream.get_final_message()).usage == usage


@in_loop
async def test_models() -> None:
    async with daemon_and_client() as (daemon, client):
        path = daemon.store.get("tiny").path
        for number in range(4):
            daemon.store.add(f"org/m{number}:q4", path)
        names = ["tiny", *(f"org/m{number}:q4" for number in range(4))]
        assert [model.id async for model in client.models.list()] == names
        assert [model.id async for model in client.models.list(limit=2)] == names
        assert [model.id async for model in client.beta.models.list(limit=2)] == names
        page = await client.models.list(limit=2, before_id=names[3])
        assert [model.id for model in page.data] == names[1:3] and page.has_more
        assert (await client.models.list(after_id=names[-1])).data == []
        found = await client.models.retrieve("org/m1:q4")
        assert (found.id, found.type, found.display_name) == ("org/m1:q4", "model", "org/m1:q4")
        assert found.created_at == datetime.datetime.fromtimestamp(1700000000, datetime.UTC)
        await client.messages.create(**HI)
        assert (await client.models.retrieve("tiny")).max_input_tokens == 512
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("nosuch")
        for bad in ({"limit": 0}, {"after_id": "nosuch"}):
            with pytest.raises(anthropic.BadRequestError):
                await client.models.list(**bad)


@in_loop
async def test_errors_as_the_sdk_sees_them() -> None:
    async with daemon_and_client(max_queue=1) as (daemon, client):
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**HI | {"model": "nosuch"})
        assert missing.value.type == "not_found_error" and missing.value.request_id.startswith("req_")
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**HI, extra_body={"temperature": -1})
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"):
            long = {"role": "user", "content": "x " * 600}
            await client.messages.create(**HI | {"messages": [long]}, stream=True)
        await client.messages.create(**HI)
        daemon.engine.gate.clear()
        first = asyncio.create_task(client.messages.create(**HI))
        await until_so(lambda: daemon.engine.running)
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**HI)
        daemon.engine.gate.set()
        await first


@in_loop
async def test_an_engine_that_dies_ends_streams_with_an_error() -> None:
    async with daemon_and_client("tcp") as (daemon, client):
        stream = await client.messages.create(**HI, stream=True)
        assert (await anext(stream)).type == "message_start"
        daemon.engine.died.set_result("the engine process was ended by SIGKILL")
        with pytest.raises(anthropic.APIStatusError, match="SIGKILL"):
            async for _ in stream:
                pass


@in_loop
async def test_closing_a_stream_ends_the_work() -> None:
    async with daemon_and_client("tcp") as (daemon, client):
        async with client.messages.stream(**HI | {"max_tokens": 400}) as stream:
            await anext(aiter(stream.text_stream))
            daemon.engine.gate.clear()
        await daemon.settle()
        assert daemon.engine.aborted


@in_loop
async def test_pings_while_a_model_loads_and_while_it_is_silent() -> None:
    async with daemon_and_client("tcp", timing=Timing(ping_seconds=0.01)) as (daemon, client):
        daemon.engines.release = asyncio.Event()
        stream = client.messages.with_streaming_response.create(**HI, stream=True)
        async with stream as response:
            lines = response.iter_lines()
            while await anext(lines) != "event: ping":
                pass
            daemon.engines.release.set()
            while await anext(lines) != "event: message_start":
                pass
            daemon.engine.gate.clear()
            while await anext(lines) != "event: ping":
                pass
            daemon.engine.gate.set()
            rest = [line async for line in lines]
        assert rest[-3:-1] == ["event: message_stop", 'data: {"type":"message_stop"}']


@in_loop
async def test_a_tool_loop_with_thinking() -> None:
    """The SDK's own runner calls the tool and sends its result with all that was said before."""

    @anthropic.beta_async_tool
    async def read_gauge(n: int) -> str:
        """Reads a gauge."""
        return f"gauge {n}: 12 bar"

    question: Any = [{"role": "user", "content": "How is gauge 4?"}]
    body: Any = {"model": "tiny", "max_tokens": 400, "messages": question, "tools": [read_gauge]}
    async with daemon_and_client(template=TEMPLATE) as (daemon, client):
        await client.messages.create(**HI)
        be_an_agent(daemon)
        for stream in (False, True):
            runner = client.beta.messages.tool_runner(**body, stream=stream)
            turns = [await turn.get_final_message() if stream else turn async for turn in runner]
            first, last = turns
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
            assert first.content[0].thinking == "Let me look." and first.content[0].signature
            assert (first.content[2].name, first.content[2].input) == ("read_gauge", {"n": 4})
            assert (first.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
            assert [block.type for block in last.content] == ["thinking", "text"]
            assert last.content[1].text == "It is 12 bar."
            assert '](Let me look.)I look.read_gauge{"n": 4}[tool]gauge 4: 12 bar[{' in last_prompt(daemon)
        refusal = client.messages.create(
            model="tiny", max_tokens=4, messages=question, tool_choice={"type": "tool", "name": "x"}
        )
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await refusal


class City(pydantic.BaseModel):
    name: str
    people: int


@in_loop
async def test_structured_output() -> None:
    """Under the field's present name and the one before; the rule is that of the same schema for chats."""
    async with daemon_and_client() as (daemon, client):
        await client.messages.create(**HI)
        say(daemon, '{"name":"Oslo","people":7}')
        body: Any = HI | {"max_tokens": 100}
        parsed = await client.messages.parse(**body, output_format=City)
        assert parsed.parsed_output == City(name="Oslo", people=7)
        async with client.messages.stream(**body, output_format=City) as stream:
            assert (await stream.get_final_message()).parsed_output == parsed.parsed_output
        schema = City.model_json_schema()
        format: Any = {"type": "json_schema", "schema": schema}
        chat = {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}}
        await daemon.post("/v1/chat/completions", HI | chat)
        expected = last_grammar(daemon)
        for fields in ({"output_config": {"format": format}}, {"output_format": format}):
            await client.messages.create(**body, extra_body=fields)
            assert last_grammar(daemon) == expected is not None
        format["schema"] = {"not": schema}
        with pytest.raises(anthropic.BadRequestError, match="not"):
            await client.messages.create(**body, output_config={"format": format})


@in_loop
async def test_forced_tools_have_the_rules_that_chats_have() -> None:
    tool: Any = {
        "name": "read_gauge",
        "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}},
    }
    functions = [
        {"type": "function", "function": {"name": name, "parameters": tool["input_schema"]}} for name in "ab"
    ]
    tools: Any = [tool | {"name": name} for name in "ab"]
    async with daemon_and_client(template=TEMPLATE) as (daemon, client):
        for choice, fields in (
            ({"type": "auto"}, {}),
            ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
            ({"type": "any"}, {"tool_choice": "required"}),
            ({"type": "tool", "name": "b"}, {"tool_choice": functions[1]}),
            ({"type": "none"}, {"tool_choice": "none"}),
        ):
            await daemon.post("/v1/chat/completions", HI | {"tools": functions} | fields)
            expected = last_grammar(daemon), last_prompt(daemon)
            await client.messages.create(**HI, tools=tools, tool_choice=choice)
            assert (last_grammar(daemon), last_prompt(daemon)) == expected
            assert (expected[0] is None) == (choice["type"] == "none")
