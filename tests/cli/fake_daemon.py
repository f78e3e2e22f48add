"""A small stand-in for a daemon on a Unix socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from waiting import PATIENCE

from quantd.engine.messages import Stats

Quantd = Callable[..., "subprocess.CompletedProcess[str]"]
"""The command line, run with these arguments."""

INFO = {
    "architecture": "llama",
    "backend": "cpu",
    "weight_bytes": 92_000_000,
    "kv_dtype": "int8",
    "kv_bytes": 50_000_000,
    "num_blocks": 100,
    "block_size": 16,
    "max_model_len": 2048,
    "vocab_size": 256,
    "hidden_size": 64,
    "kv_bytes_per_token": 31_250,
    "load_seconds": 0.5,
    "num_ranks": 1,
}
STATS = Stats(
    num_running=2,
    num_waiting=1,
    blocks_total=100,
    blocks_free=50,
    blocks_cached=20,
    prefix_queries=2000,
    prefix_hits=1500,
    generated_tokens=1000,
    computed_tokens=9000,
)


def request(client: str, route: str, phase: str, **tokens: int) -> dict[str, Any]:
    """A request as the daemon tells of it, with 900 tokens of prompt."""
    counts = {"prompt_tokens": 900, "computed_tokens": 0, "cached_tokens": 0, "output_tokens": 0} | tokens
    rate = 25.5 if phase == "decode" else None
    return {
        "id": f"req_{client}",
        "client": {"name": client, "id": "uid:1000", "pid": 7, "address": None, "agent": None},
        "route": route,
        "model": "tiny",
        "phase": phase,
        "why": "behind 2 running requests" if phase == "waiting" else None,
        "seconds": 12.0,
        "choices": 1,
        "tokens_per_second": rate,
    } | counts


STATUS = {
    "version": "0.1.0",
    "pid": 2**22 + 1,  # above the kernel's highest process id
    "uptime_seconds": 61.5,
    "listening": ["unix:/x", "http://0.0.0.0:11999"],
    "log": {"kind": "terminal", "path": "/dev/pts/3"},
    "request_log": None,
    "memory": {"daemon_bytes": 80_000_000, "total_bytes": 32_000_000_000, "available_bytes": 14_200_000_000},
    "models": [
        {
            "name": "tiny",
            "state": "ready",
            "progress": {"done": 100, "total": 100},
            "pinned": True,
            "waiting": [{"id": "7-0", "seconds": 12.4, "why": "behind 2 requests"}],
            "info": INFO,
            "stats": msgspec.to_builtins(STATS),
            "pool": {
                "blocks_per_cell": 1,
                "held": [1] * 30 + [0] * 70,
                "cached": [0] * 30 + [1] * 20 + [0] * 50,
            },
            "memory_bytes": 500_000_000,
            "unloads_in": 840.0,
        },
        {
            "name": "big",
            "state": "loading",
            "progress": {"done": 25, "total": 100},
            "info": None,
            "stats": None,
            "pool": None,
            "memory_bytes": None,
            "pinned": False,
            "waiting": [],
            "unloads_in": None,
        },
    ],
    "requests": [
        request("zed", "POST /v1/chat/completions", "decode", computed_tokens=900, output_tokens=41),
        request("aider", "POST /v1/chat/completions", "waiting"),
        request("vim", "POST /infill", "prefill", computed_tokens=512),
    ],
    "stopped": {"bad": "it was killed"},
}
MODELS = {"data": [{"id": "big"}, {"id": "tiny", "max_model_len": 1600}]}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


class FakeDaemon:
    """Answers "Hello there" to everything; keeps what it was sent, and whether a client left early."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "api.sock"
        self.bodies: list[dict[str, Any]] = []
        self.loads: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.chat_error: dict[str, Any] | None = None
        self.endless = False
        self.cut = False
        self.status: dict[str, Any] = STATUS
        self.left = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ready, self._stopping = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/quantd/version", _always({"version": "0.1.0"}))
        app.router.add_get("/quantd/status", self._status)
        app.router.add_get("/v1/models", _always(MODELS))
        app.router.add_post("/quantd/load", self._load)
        app.router.add_post("/quantd/unload", _always({"status": "unloaded"}))
        app.router.add_post("/quantd/stop", _always({"status": "stopping"}))
        app.router.add_post("/quantd/cancel", self._cancel)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.UnixSite(runner, str(self.socket)).start()
        self._ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self.status)

    async def _cancel(self, request: web.Request) -> web.Response:
        """As of a request that has just ended, where the id says so."""
        id = (await request.json())["id"]
        if id.endswith("ended"):
            error = {"message": f"no request {id!r} is under way", "code": "request_not_found"}
            return web.json_response({"error": error}, status=404)
        self.cancelled.append(id)
        return web.json_response({"status": "cancelled", "id": id})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        self.loads.append(await request.json())
        name = self.loads[-1]["model"]
        if name == "gone":
            error = {"message": "No model gone here; quantd pull gone", "code": "model_not_found"}
            return web.json_response({"error": error}, status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        lines: list[dict[str, Any]] = [{"status": "loading", "done": 50, "total": 100}]
        lines.append({"error": {"message": "shard 2 is missing"}} if name == "broken" else _ready(name))
        for line in lines:
            await response.write(json.dumps(line).encode() + b"\n")
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.chat_error is not None:
            return web.json_response({"error": self.chat_error}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._answer(response)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return response

    async def _answer(self, response: web.StreamResponse) -> None:
        await response.write(b": ping\n\n")
        for text in ("Hello", " there"):
            await response.write(_event({"choices": [{"index": 0, "delta": {"content": text}}]}))
        if self.cut:
            return
        while self.endless:
            await response.write(_event({"choices": [{"index": 0, "delta": {"content": "."}}]}))
            await asyncio.sleep(0.02)
        await response.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        await response.write(_event({"choices": [], "usage": _USAGE}))
        await response.write(b"data: [DONE]\n\n")


def _ready(name: str) -> dict[str, Any]:
    info = INFO | ({"backend": "reference"} if name == "slow" else {})
    return {"status": "ready", "info": info}


def _always(value: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(value)

    return handle


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
