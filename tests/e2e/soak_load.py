"""Clients of every kind at a daemon for a while: patient ones, ones that leave, ones that send nonsense."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import httpx2

_PREFIX = [20 + number * number % 97 for number in range(120)]
_SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
_NONSENSE: Sequence[tuple[str, bytes]] = (
    ("/v1/chat/completions", b'{"model": "tiny", "messages": ['),
    ("/v1/chat/completions", b'{"model": "tiny", "messages": 7}'),
    ("/v1/chat/completions", b'{"model": "none such", "messages": [{"role": "user", "content": "x"}]}'),
    ("/v1/completions", b'{"model": "tiny", "prompt": [-1]}'),
    ("/v1/completions", b'{"model": "tiny", "prompt": [40], "n": -1}'),
    ("/v1/completions", b'{"model": "tiny", "prompt": [40], "temperature": "hot"}'),
    ("/v1/messages", b'{"model": "tiny", "max_tokens": 0, "messages": []}'),
    ("/v1/responses", b'{"model": "tiny", "input": [{"type": "message"}]}'),
    ("/v1/embeddings", b'{"model": "tiny", "input": []}'),
    ("/api/chat", b'{"model": "tiny", "messages": [{"role": "nobody"}]}'),
    ("/api/generate", b"\xff\xfe"),
    ("/infill", b"[]"),
    ("/no/such/path", b"{}"),
)


@dataclass
class Tally:
    """What clients saw. statuses: of all replies; ttft: seconds to the first event of streams; odd: what no
    client should see.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    left: int = 0
    odd: list[str] = field(default_factory=list)

    def note(self, reply: httpx2.Response, wanted: Sequence[int]) -> None:
        """Count a reply. Where there are too many clients, it says when to come back."""
        self.statuses[reply.status_code] += 1
        if reply.status_code == 429:
            if "retry-after" not in reply.headers:
                self.odd.append("429 without Retry-After")
        elif reply.status_code not in wanted:
            self.odd.append(f"{reply.request.url.path}: {reply.status_code}")

    def percentile(self, share: float) -> float:
        """Of the times to the first event, in seconds."""
        return sorted(self.ttft)[min(len(self.ttft) - 1, int(share * len(self.ttft)))]


Act: TypeAlias = Callable[[httpx2.AsyncClient, Random, Tally], Awaitable[None]]


def _words(rng: Random) -> list[dict[str, str]]:
    text = " ".join(rng.choice(("red", "green", "blue", "one", "two")) for _ in range(rng.randrange(1, 60)))
    return [{"role": "user", "content": text}]


def _ids(rng: Random) -> list[int]:
    own = [rng.randrange(20, 220) for _ in range(rng.randrange(1, 100))]
    return _PREFIX + own if rng.random() < 0.5 else own


async def _stream(
    http: httpx2.AsyncClient, tally: Tally, path: str, body: dict[str, Any], most_chunks: int
) -> None:
    """Read a streamed answer, of which a client may have enough after some chunks."""
    begun, chunks = time.monotonic(), 0
    async with http.stream("POST", path, json=body | {"stream": True}) as reply:
        tally.note(reply, [200])
        async for _ in reply.aiter_raw():
            chunks += 1
            if chunks == 1:
                tally.ttft.append(time.monotonic() - begun)
            if chunks == most_chunks:
                tally.left += 1
                return


async def _chat(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    body = {"model": "tiny", "messages": _words(rng), "max_tokens": rng.randrange(1, 40)}
    await _stream(http, tally, "/v1/chat/completions", body, -1)


async def _chat_and_leave(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    body = {"model": "tiny", "messages": _words(rng), "max_tokens": 2000, "ignore_eos": True}
    await _stream(http, tally, "/v1/chat/completions", body, rng.randrange(1, 12))


async def _messages(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    body = {"model": "tiny", "messages": _words(rng), "max_tokens": rng.randrange(1, 30)}
    await _stream(http, tally, "/v1/messages", body, rng.choice((-1, 3)))


async def _ollama(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    body = {"model": "tiny", "messages": _words(rng), "options": {"num_predict": rng.randrange(1, 30)}}
    await _stream(http, tally, "/api/chat", body, rng.choice((-1, 2)))


async def _complete(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    body = {
        "model": "tiny",
        "prompt": _ids(rng),
        "max_tokens": rng.randrange(1, 30),
        "n": rng.randrange(1, 3),
    }
    tally.note(await http.post("/v1/completions", json=body), [200])


async def _schema(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": False}}
    body = {"model": "tiny", "messages": _words(rng), "max_tokens": 60, "response_format": form}
    reply = await http.post("/v1/chat/completions", json=body)
    tally.note(reply, [200])
    if reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] == "stop":
        json.loads(reply.json()["choices"][0]["message"]["content"])


async def _leave_early(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    body = {"model": "tiny", "prompt": _ids(rng), "max_tokens": 3000, "ignore_eos": True}
    try:
        await http.post("/v1/completions", json=body, timeout=rng.random())
    except httpx2.TimeoutException:
        tally.left += 1


async def _embed(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    body = {"model": "tiny", "input": [_ids(rng) for _ in range(rng.randrange(1, 4))]}
    tally.note(await http.post("/v1/embeddings", json=body), [200])


async def _nonsense(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    path, body = rng.choice(_NONSENSE)
    headers = {"content-type": "application/json"}
    tally.note(await http.post(path, content=body, headers=headers), [400, 404, 422])


async def _look(http: httpx2.AsyncClient, rng: Random, tally: Tally) -> None:
    path = rng.choice(("/metrics", "/quantd/status", "/v1/models", "/api/ps", "/health"))
    tally.note(await http.get(path), [200])


ACTS: Sequence[Act] = (
    *(_chat, _chat, _chat_and_leave, _messages, _ollama),
    *(_complete, _schema, _leave_early, _embed, _nonsense, _look),
)


REQUESTS: Sequence[Act] = (_chat, _messages, _ollama, _complete)


def after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has gone since this call."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


async def load(
    path: Path, num_clients: int, is_over: Callable[[], bool], acts: Sequence[Act] = ACTS
) -> Tally:
    """So many clients at a Unix socket, each with its connection and its own things to do one by one."""
    tally = Tally()

    async def client(number: int) -> None:
        rng = Random(number)
        transport = httpx2.AsyncHTTPTransport(uds=str(path))
        async with httpx2.AsyncClient(transport=transport, base_url="http://x", timeout=120) as http:
            while not is_over():
                await rng.choice(acts)(http, rng, tally)

    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(client(number))
    return tally
