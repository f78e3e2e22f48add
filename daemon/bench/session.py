"""Loads on a running daemon: streamed completions, all at once, and the moments at which their text comes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, TypeAlias

import aiohttp
import msgspec

from quantd.daemon.bench.loads import Load, make_prompts
from quantd.daemon.bench.results import Result, Run, Timeline, summarize
from quantd.daemon.errors import DaemonError
from quantd.engine.messages import ModelInfo, Stats

Address: TypeAlias = Path | tuple[str, int]

# The daemon gives a sign of life every few seconds; one that is silent for so long has hung.
_SILENCE_SECONDS = 120.0
_SAMPLE_SECONDS = 0.05
_SEED = 20240229


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details = _Details()


class _Chunk(msgspec.Struct, frozen=True):
    """What matters of a frame of a stream."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


async def run_loads(
    address: Address,
    model: str,
    info: ModelInfo,
    loads: Collection[Load],
    num_runs: int,
    on_load: Callable[[Load], object],
    seed: int = _SEED,
    headers: Mapping[str, str] | None = None,
) -> list[Result]:
    """Measure a loaded model, one load after another, each `num_runs` times; `on_load` is told of each.

    seed: of the prompts. headers: of all requests. Raises DaemonError.
    """
    async with Session(address, model, seed, headers or {}) as session:
        await session.warm_up(info)
        results = []
        for load in loads:
            on_load(load)
            results.append(summarize(load, [await session.run(load, info) for _ in range(num_runs)]))
        return results


class Session:
    """Connections to one model of a daemon.

    Prompts are the same in every session of a seed. What it puts into quantd's prefix cache, no other one
    finds.
    """

    def __init__(self, address: Address, model: str, seed: int, headers: Mapping[str, str]) -> None:
        self._model = model
        self._rng = Random(seed)
        self._salt = uuid.uuid4().hex
        self._decoder = msgspec.json.Decoder(_Chunk)
        if isinstance(address, Path):
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(str(address), limit=0)
            url = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(limit=0)
            url = "http://{}:{}".format(f"[{address[0]}]" if ":" in address[0] else address[0], address[1])
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_SECONDS)
        self._http = aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=headers)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def warm_up(self, info: ModelInfo) -> None:
        """A first answer, which wakes what sleeps."""
        await self.run(Load(kind="decode", prompt_len=1, output_len=1), info)

    async def run(self, load: Load, info: ModelInfo) -> Run:
        """One pass of a load. Raises DaemonError where a request fails; the others are then given up."""
        shared, prompts = make_prompts(load, info.vocab_size, self._rng)
        if load.primed:
            await self._complete(shared, 1)
        async with self._sampling(info.block_size) as slots:
            timelines = await asyncio.gather(*(self._complete(ids, load.output_len) for ids in prompts))
        return Run(timelines, slots)

    async def _complete(self, prompt: list[int], num_tokens: int) -> Timeline:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": self._salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.perf_counter()
        arrivals, usage = [], None
        async with self._exchange("POST", "/v1/completions", body) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = self._decoder.decode(line[len(b"data: ") :])
                if chunk.error is not None:
                    raise DaemonError(f"A request failed: {_reason(chunk.error)}")
                if chunk.choices:
                    arrivals.append(time.perf_counter())
                usage = chunk.usage or usage
        if usage is None or not arrivals:
            raise DaemonError("The daemon ended an answer before it was complete.")
        cached = usage.prompt_tokens_details.cached_tokens
        return Timeline(sent, tuple(arrivals), usage.prompt_tokens, usage.completion_tokens, cached)

    @asynccontextmanager
    async def _sampling(self, block_size: int) -> AsyncIterator[list[tuple[int, int]]]:
        """Look at the KV cache now and then while the block runs: (live, allocated) slots."""
        slots: list[tuple[int, int]] = []
        task = asyncio.create_task(self._sample(slots, block_size))
        try:
            yield slots
        finally:
            task.cancel()
            # What goes wrong in it goes wrong in the requests too, which tell it better.
            await asyncio.gather(task, return_exceptions=True)

    async def _sample(self, slots: list[tuple[int, int]], block_size: int) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            stats = await self._stats()
            held = stats.blocks_total - stats.blocks_free - stats.blocks_cached
            slots.append((stats.live_slots, held * block_size))

    async def _stats(self) -> Stats:
        async with self._exchange("GET", "/quantd/status", None) as response:
            status = await response.json()
        (fields,) = (entry["stats"] for entry in status["models"] if entry["name"] == self._model)
        return msgspec.convert(fields, Stats)

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: object) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._http.request(method, path, json=body) as response:
                if response.status >= 400:
                    raise DaemonError(f"A request failed: {_reason((await response.json())['error'])}")
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise DaemonError(f"The connection to the daemon broke: {error!r}") from None


def _reason(error: Any) -> str:
    """The message of an error object as OpenAI has it."""
    return str(error.get("message", error) if isinstance(error, dict) else error)
