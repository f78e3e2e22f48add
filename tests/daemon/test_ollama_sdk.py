"""The official `ollama` package against the daemon, over TCP and over the Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import httpx
import ollama
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from fake_models import QWEN_INFILL

HI = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 5, "temperature": 0}
Result = TypeVar("Result")


@contextlib.asynccontextmanager
async def async_client(daemon: Daemon, transport: str = "unix") -> AsyncIterator[ollama.AsyncClient]:
    if transport == "tcp":
        client = ollama.AsyncClient(host=f"http://127.0.0.1:{daemon.port}")
    else:
        uds = httpx.AsyncHTTPTransport(uds=str(daemon.path))
        client = ollama.AsyncClient(host="http://quantd", transport=uds)
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def daemon_and_client(
    transport: str = "unix", **daemon: Any
) -> AsyncIterator[tuple[Daemon, ollama.AsyncClient]]:
    async with running_daemon(**daemon) as running, async_client(running, transport) as client:
        yield running, client


async def with_sync(daemon: Daemon, use: Callable[[ollama.Client], Result]) -> Result:
    """What the blocking client gives, in a thread of its own."""

    def call() -> Result:
        with ollama.Client(host=f"127.0.0.1:{daemon.port}") as client:
            return use(client)

    return await asyncio.to_thread(call)


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_chat_and_generate(transport: str) -> None:
    async def talk() -> None:
        async with daemon_and_client(transport) as (_, client):
            whole = await client.chat("tiny", HI, options=SHORT)
            assert whole.message.content == "user\nhi\n" and whole.done_reason == "length"
            parts = [part async for part in await client.chat("tiny", HI, stream=True, options=SHORT)]
            assert "".join(part.message.content or "" for part in parts) == whole.message.content
            assert parts[-1].eval_count == whole.eval_count == 5
            text = await client.generate("tiny", "hi", options=SHORT, keep_alive="5m", system="x")
            assert text.response and text.prompt_eval_count
            streamed = await client.generate("tiny", "hi", stream=True, options=SHORT, system="x")
            assert "".join([part.response async for part in streamed]) == text.response

    in_loop(talk)()


@in_loop
async def test_the_blocking_client() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:

        def use(client: ollama.Client) -> list[str]:
            parts = list(client.chat("tiny", HI, stream=True, options=SHORT))
            whole = client.generate("tiny", "a", suffix="b", options=SHORT)
            assert client.list().models[0].model == "tiny:latest"
            assert client.ps().models[0].context_length == 512
            assert "insert" in (client.show("tiny").capabilities or [])
            return ["".join(part.message.content or "" for part in parts), whole.response]

        chat, infill = await with_sync(daemon, use)
        assert chat == "user\nhi\n" and infill


@in_loop
async def test_log_probabilities_and_options_object() -> None:
    async with daemon_and_client() as (daemon, client):
        options = ollama.Options(num_predict=2, top_k=3, repeat_penalty=1.1, num_ctx=128, num_gpu=0)
        reply = await client.chat("tiny", HI, options=options, logprobs=True, top_logprobs=2)
        assert reply.logprobs and [len(entry.top_logprobs or []) for entry in reply.logprobs] == [2, 2]
        assert daemon.engine.seen[-1].sampling.top_k == 3


@in_loop
async def test_loading_and_unloading() -> None:
    async with daemon_and_client() as (_, client):
        assert (await client.generate("tiny")).done_reason == "load"
        running = (await client.ps()).models
        assert [model.name for model in running] == ["tiny:latest"] and running[0].expires_at
        assert (await client.generate("tiny", keep_alive=0)).done_reason == "unload"
        assert (await client.ps()).models == []


@in_loop
async def test_errors_as_the_sdk_sees_them() -> None:
    async with daemon_and_client() as (daemon, client):
        with pytest.raises(ollama.ResponseError, match="'nosuch'") as missing:
            await client.chat("nosuch", HI)
        assert missing.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="600 tokens") as long:
            await client.generate("tiny", "x" * 600, raw=True)
        assert long.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match="images"):
            await client.chat("tiny", [{"role": "user", "content": "hi", "images": [b"\x89PNG"]}])
        stream = await client.chat("tiny", HI, stream=True)
        await anext(stream)
        daemon.engine.died.set_result("the engine process was ended by SIGKILL")
        with pytest.raises(ollama.ResponseError, match="SIGKILL"):
            async for _ in stream:
                pass


@in_loop
async def test_leaving_a_stream_aborts() -> None:
    async with daemon_and_client() as (daemon, client):
        stream = await client.chat("tiny", HI, stream=True, options={"num_predict": 400})
        await anext(stream)
        daemon.engine.gate.clear()
        await stream.aclose()
        await daemon.settle()
        assert daemon.engine.aborted
