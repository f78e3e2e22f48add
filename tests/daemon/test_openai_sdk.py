"""The official `openai` package against the daemon, over TCP and over the Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import httpx2
import openai
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon

HI = [{"role": "user", "content": "hi"}]
Result = TypeVar("Result")


def async_client(daemon: Daemon, transport: str) -> openai.AsyncOpenAI:
    if transport == "tcp":
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key="any", max_retries=0)
    uds = httpx2.AsyncHTTPTransport(uds=str(daemon.path))
    client = openai.DefaultAsyncHttpxClient(transport=uds)
    return openai.AsyncOpenAI(base_url="http://quantd/v1", api_key="any", http_client=client, max_retries=0)


def sync_client(daemon: Daemon, transport: str) -> openai.OpenAI:
    if transport == "tcp":
        return openai.OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key="any", max_retries=0)
    client = openai.DefaultHttpxClient(transport=httpx2.HTTPTransport(uds=str(daemon.path)))
    return openai.OpenAI(base_url="http://quantd/v1", api_key="any", http_client=client, max_retries=0)


async def with_sync(daemon: Daemon, transport: str, use: Callable[[openai.OpenAI], Result]) -> Result:
    def call() -> Result:
        with sync_client(daemon, transport) as client:
            return use(client)

    return await asyncio.to_thread(call)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_async_sdk(transport: str) -> None:
    async def talk() -> None:
        async with running_daemon() as daemon, async_client(daemon, transport) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            whole = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=9)
            assert whole._request_id.startswith("req_")
            stream = await client.chat.completions.create(
                model="tiny", messages=HI, max_tokens=9, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == whole.choices[0].message.content
            assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens == 9
            logprobs = (
                (
                    await client.chat.completions.create(
                        model="tiny", messages=HI, max_tokens=4, logprobs=True, top_logprobs=2
                    )
                )
                .choices[0]
                .logprobs
            )
            assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 4
            raw = await client.completions.create(model="tiny", prompt=[[40], [41]], n=2, logprobs=1)
            assert [choice.index for choice in raw.choices] == [0, 1, 2, 3]

    in_loop(talk)()


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_sync_sdk(transport: str) -> None:
    def chat(client: openai.OpenAI) -> str:
        chunks = client.chat.completions.create(model="tiny", messages=HI, max_tokens=5, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def complete(client: openai.OpenAI) -> str:
        parts = client.completions.create(model="tiny", prompt="one two", max_tokens=5, stream=True)
        return "".join(part.choices[0].text for part in parts)

    async def talk() -> None:
        async with running_daemon() as daemon:
            assert await with_sync(daemon, transport, chat) == "user\nhi\n"
            assert "one two".startswith((await with_sync(daemon, transport, complete))[:3])

    in_loop(talk)()


@in_loop
async def test_errors_as_the_sdk_sees_them() -> None:
    async with running_daemon() as daemon, async_client(daemon, "unix") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nosuch", messages=HI)
        assert missing.value.code == "model_not_found" and missing.value.request_id.startswith("req_")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="tiny", prompt=[40] * 600)
        assert long.value.code == "context_length_exceeded"


@in_loop
async def test_an_engine_that_dies_ends_streams_with_an_error() -> None:
    async with running_daemon() as daemon, async_client(daemon, "tcp") as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        await anext(stream)
        daemon.engine.died.set_result("the engine process was ended by SIGKILL")
        with pytest.raises(openai.APIError, match="SIGKILL"):
            async for _ in stream:
                pass
        again = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=2)
        assert again.usage.completion_tokens == 2
        assert len(daemon.engines.started) == 2
