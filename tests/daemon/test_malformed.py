"""Ten thousand requests that are wrong in every way, over the wire: they are refused, the daemon lives on."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from daemon_in_loop import CASES, Daemon, in_loop, running_daemon
from waiting import PATIENCE

from quantd.engine.request import Request

NUM_REQUESTS = 10_000
NUM_CONNECTIONS = 16
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi"}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CHAT = {
    "messages": [*MESSAGES, {"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "content": "2"}],
    "tools": [TOOL],
    "max_tokens": 2,
    "stop": ["a"],
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "stream": False,
}
BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "suffix": None}),
    ("/v1/fim/completions", {"prompt": "a", "suffix": "b", "max_tokens": 2}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float", "dimensions": 2}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "text": {"format": {"type": "text"}}}),
    ("/v1/messages", {"max_tokens": 2, "messages": MESSAGES, "system": [{"type": "text", "text": "s"}]}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES, "tools": [{"name": "f", "input_schema": {}}]}),
    ("/api/chat", {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 2}, "stream": False}),
    ("/api/generate", {"model": "tiny", "prompt": "hi", "options": {"num_predict": 2}, "stream": False}),
    ("/api/embed", {"model": "tiny", "input": ["a"]}),
    ("/completion", {"prompt": ["a", 1], "n_predict": 2, "samplers": ["top_k"], "stop": ["x"]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2, "input_extra": []}),
    ("/tokenize", {"content": "a", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/apply-template", {"messages": MESSAGES}),
    ("/slots/0?action=save", {"filename": "x"}),
    ("/quantd/load", {"model": "tiny", "options": {"threads": 1}}),
)
# Of these a sound body would change the store.
BROKEN_ONLY = ("/api/pull", "/api/create", "/api/copy", "/api/show", "/quantd/unload")
VALUES: Sequence[Any] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**40, 1e308, -0.0, 0.5, "", "a", "\0", "é\u2028", [], {}),
    *([[]], [None], {"a": {}}, {"": None}, ["a", 1], "a" * 5000, [1] * 2000, {"type": "object"}, "tiny"),
)
BROKEN = (b"", b"{", b"null", b"[]", b"\xff\xfe", b"{'a': 1}", b'{"a": NaN}', b'{"a": 1e999}', b'"\\ud800"')
DEEP = (b"[" * 5000, b'{"messages":' * 3000, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}")
SURROGATE = (
    b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}],"prompt":"\\udfff","max_tokens":1}'
)
HEADERS = (
    *("Content-Encoding: gzip", "Content-Encoding: zstd", "Content-Encoding: x", "Content-Type: text/plain"),
    *("Expect: 100-continue", "Expect: x", "anthropic-version: 1", "Accept-Encoding: x", "Range: bytes=1-"),
)
BAD_HTTP = (
    b"\r\n\0\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"POST /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX\0: a\r\n\r\n",
    b"GET /v1/%zz/../%00 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
)


def wild(random: Random) -> tuple[str, bytes]:
    """A path and a body that is wrong, or at least odd."""
    path, sound = random.choice(BODIES)
    kind = random.randrange(10)
    if kind == 0:
        return random.choice([path, *BROKEN_ONLY]), random.choice(BROKEN)
    if kind == 1:
        return path, random.choice([*DEEP, SURROGATE])
    data = json.dumps(_changed(random, sound)).encode()
    if kind == 2:
        return random.choice([path, *BROKEN_ONLY]), data[: random.randrange(len(data))]
    if kind == 3:
        place = random.randrange(len(data))
        return path, data[:place] + random.randbytes(random.randrange(4)) + data[place + 1 :]
    return path, data


def _changed(random: Random, sound: dict[str, Any]) -> Any:
    """A body with a few of its values, at any depth, replaced, dropped or under another name."""
    body = copy.deepcopy(sound)
    for _ in range(random.randrange(1, 4)):
        places = list(_places(body))
        holder, key = random.choice(places)
        if isinstance(holder, dict) and random.random() < 0.2:
            holder[random.choice(_NAMES)] = copy.deepcopy(random.choice(VALUES))
        else:
            holder[key] = copy.deepcopy(random.choice(VALUES))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list) and len(inner) < 100:
            yield from _places(inner)


def _all_names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _all_names(inner)


_NAMES = sorted({name for file in CASES.glob("*.json") for name in _all_names(json.loads(file.read_text()))})


def framed(random: Random, path: str, body: bytes) -> bytes:
    header = random.choice(HEADERS) if random.random() < 0.1 else "Accept: */*"
    if header == "Content-Encoding: gzip" and random.random() < 0.5:
        body = gzip.compress(body)[: random.randrange(10, 40)]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Connection:
    """One of a pool: opened again after the daemon has closed it."""

    def __init__(self, daemon: Daemon) -> None:
        self._path = str(daemon.path)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> int | None:
        """The status of the answer, all of which is read; None: the daemon hung up without one."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path)
        reader, writer = self._streams
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 100"):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._skip_body(reader, head.lower())
            if b"connection: close" in head.lower():
                await self.close()
            return int(head.split(maxsplit=2)[1])
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return None

    async def _skip_body(self, reader: asyncio.StreamReader, head: bytes) -> None:
        if b"transfer-encoding: chunked" in head:
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        elif b"content-length: " in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def ask_all(daemon: Daemon, requests: Iterator[bytes], seen: Counter[int | None]) -> None:
    connection = Connection(daemon)
    for request in requests:
        try:
            async with asyncio.timeout(PATIENCE):
                status = await connection.ask(request)
        except TimeoutError:
            raise AssertionError(f"no answer to {request[:3000]!r}") from None
        assert status is None or status < 500 or status == 501, (status, request[:3000])
        if request in BAD_HTTP:
            await connection.close()
        seen[status] += 1
    await connection.close()


def held() -> int:
    """Open files and running tasks."""
    return psutil.Process().num_fds() + len(asyncio.all_tasks())


def few_tokens(request: Request) -> Sequence[int]:
    return [40, 41, 2]


@in_loop
async def test_ten_thousand_malformed_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever ends as a 500, or hangs, or leaves something behind, is a fault of the daemon's."""
    random = Random(1)
    requests = (
        random.choice(BAD_HTTP) if random.random() < 0.05 else framed(random, *wild(random))
        for _ in range(NUM_REQUESTS)
    )
    seen: Counter[int | None] = Counter()
    async with running_daemon(few_tokens) as daemon:
        for path, body in BODIES[:9]:  # What they start stays, as the process for grammars.
            assert (await daemon.post(path, body))[0] in (200, 400), path
        before = held()
        with caplog.at_level(logging.ERROR):
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_CONNECTIONS):
                    group.create_task(ask_all(daemon, requests, seen))
        await daemon.settle()
        assert sum(seen.values()) == NUM_REQUESTS
        assert seen[400] > NUM_REQUESTS / 2 and seen[200] > 100, seen
        assert (await daemon.post("/v1/chat/completions", {"messages": MESSAGES}))[0] == 200
        for _ in range(1000):
            if held() <= before:
                break
            await asyncio.sleep(0.01)
        assert held() <= before, (held(), before, asyncio.all_tasks(), list(Path("/proc/self/fd").iterdir()))
        assert not [record for record in caplog.records if "should not" in record.getMessage()]
