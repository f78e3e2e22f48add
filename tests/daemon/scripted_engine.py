"""An engine without a model: it says what a script tells it, and knows what runs in it."""

from __future__ import annotations

import asyncio
import math
import os
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.loaded_model import Progress
from quantd.daemon.store import plain_name
from quantd.engine.client import MakeRoom
from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError, EngineDiedError, NotBegunError
from quantd.engine.messages import ModelInfo, PoolMap, Queue, RequestStats, Stats
from quantd.engine.request import Request, TokenEvent, TokenLogprob

INFO = ModelInfo(
    architecture="llama",
    backend="fake",
    vocab_size=514,
    hidden_size=4,
    max_model_len=512,
    weight_bytes=1000,
    kv_dtype="int8",
    kv_bytes=4096,
    kv_bytes_per_token=8,
    block_size=16,
    num_blocks=64,
    load_seconds=0.1,
)
FAULTY_TOKEN = 511
Script = Callable[[Request], Sequence[int]]


def vector_of(prompt: Sequence[int]) -> list[float]:
    """What ScriptedEngine says a prompt's vector is."""
    return [len(prompt), prompt[0], prompt[-1], 0.1]


def repeat_prompt(request: Request) -> Sequence[int]:
    """Say the prompt's ids over and over, but for special tokens."""
    return ([token for token in request.prompt if 2 < token < 512] or [40]) * 600


class ScriptedEngine:
    """Each step gives one token of the script. `gate`, while cleared, holds all steps.

    queue: where it says that its requests are. begins: whether requests have begun when it dies.
    """

    def __init__(self, script: Script = repeat_prompt, info: ModelInfo = INFO) -> None:
        self.info = info
        self.pid = os.getpid()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.script = script
        self.running: dict[str, Request] = {}
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.forgotten: list[list[int]] = []
        self.dropped: list[Sequence[bytes] | None] = []
        self.blocks_touched = 0
        self.begins = True
        self.queued: list[tuple[str, float]] = []
        self.closed = False
        self.num_steps = 0
        self.queue: Queue = "running"
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.running[request.id] = request
        self.seen.append(request)
        finished = False
        try:
            for event in self._events(request):
                await self._step()
                finished = event.finish_reason is not None
                yield event
        finally:
            del self.running[request.id]
            if not finished:
                self.aborted.append(request.id)

    async def _step(self) -> None:
        await asyncio.sleep(0)
        waiters = [asyncio.ensure_future(self.gate.wait()), self.died]
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        if self.died.done():
            raise (EngineDiedError if self.begins else NotBegunError)(self.died.result())

    def _events(self, request: Request) -> Sequence[TokenEvent]:
        if request.embedding is not None:
            return [self._embedding(request)]
        sampling = request.sampling
        room = self.info.max_request_len - len(request.prompt)
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        prompt_logprobs = []
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = [self._logprob(token, sampling.prompt_logprobs) for token in request.prompt[1:]]
        head = TokenEvent(
            request_id=request.id,
            num_cached=len(request.prompt) // 2,
            num_computed=len(request.prompt) if request.reports_progress else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=None if limit else "length",
        )
        events = [head]
        for count, token in enumerate(self.script(request), 1):
            if count > limit:
                break
            reason = "stop" if token in sampling.stop_token_ids else "length" if count == limit else None
            events.append(self._event(request, token, reason))
            if reason:
                break
        return events

    def _embedding(self, request: Request) -> TokenEvent:
        cached = len(request.prompt) // 2
        if FAULTY_TOKEN in request.prompt:
            return TokenEvent(request_id=request.id, finish_reason="error", error="a faulty token")
        vector = struct.pack("<4f", *vector_of(request.prompt))
        return TokenEvent(request_id=request.id, embedding=vector, num_cached=cached, finish_reason="length")

    def _event(self, request: Request, token: int, reason: str | None) -> TokenEvent:
        asked = request.sampling.logprobs
        logprobs = [] if asked is None else [self._logprob(token, asked)]
        return TokenEvent(request_id=request.id, token_ids=[token], logprobs=logprobs, finish_reason=reason)

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        likeliest = [(token, -0.5), (60, -1.5), (61, -math.inf)]
        return TokenLogprob(token, -0.5, likeliest[:top])

    @property
    def unbegun(self) -> Sequence[tuple[str, float]]:
        return self.queued

    def forget(self, prompt: Sequence[int], salt: str) -> None:
        self.forgotten.append(list(prompt))

    async def drop(self, keys: Sequence[bytes] | None) -> None:
        self.dropped.append(keys)

    async def stats(self, detail: bool = False) -> Stats:
        held = 2 * len(self.running)
        return Stats(
            num_running=len(self.running),
            blocks_total=64,
            blocks_free=64 - held,
            steps=self.num_steps,
            blocks_touched=self.blocks_touched,
            generated_tokens=7,
            aborts=len(self.aborted),
            requests=[self._request_stats(request) for request in self.running.values()] if detail else [],
            pool=PoolMap(blocks_per_cell=32, held=[held, 0], cached=[0, 0]) if detail else None,
        )

    def _request_stats(self, request: Request) -> RequestStats:
        size = len(request.prompt)
        return RequestStats(
            id=request.id, queue=self.queue, num_tokens=size, num_computed=size // 2, num_blocks=2
        )

    def kill(self, reason: str) -> None:
        self.died.set_result(reason)

    async def close(self) -> None:
        self.closed = True
        if not self.died.done():
            self.died.set_result("closed")


@dataclass
class FakeStored:
    name: str
    path: Path
    created: float = 1700000000.5
    source: str = "file:/somewhere"
    description: str = "gguf Q8_0"
    architecture: str = "llama"
    bytes: int = 1000


@dataclass
class FakeStore:
    models: dict[str, FakeStored] = field(default_factory=dict)
    root: Path = Path("/nowhere")

    def remove(self, name: str) -> None:
        del self.models[self.get(name).name]

    def get(self, name: str) -> FakeStored:
        if plain_name(name) not in self.models:
            raise ModelNotFoundError(f"no model {name!r}")
        return self.models[plain_name(name)]

    def list(self) -> list[FakeStored]:
        return list(self.models.values())

    def add(self, name: str, path: Path) -> None:
        self.models[name] = FakeStored(name, path)


@dataclass
class Engines:
    """Starts engines and keeps them. `failures` are raised by the next starts, first one first.

    `shortages`: bytes that the next start finds wanting, one after the other.
    """

    script: Script = repeat_prompt
    info: ModelInfo = INFO
    started: list[ScriptedEngine] = field(default_factory=list)
    configs: list[EngineConfig] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    shortages: list[int] = field(default_factory=list)
    urgent: bool = True
    release: asyncio.Event | None = None

    async def start(self, config: EngineConfig, on_progress: Progress, make_room: MakeRoom) -> ScriptedEngine:
        self.configs.append(config)
        while self.shortages:
            size = self.shortages.pop(0)
            await make_room(CapacityError(f"{size} bytes are wanting", size, self.urgent))
        for done in (0, 500, 1000):
            on_progress(done, 1000)
            await asyncio.sleep(0)
        if self.release is not None:
            await self.release.wait()
        if self.failures:
            raise self.failures.pop(0)
        engine = ScriptedEngine(self.script, self.info)
        self.started.append(engine)
        return engine
