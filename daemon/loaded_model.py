"""One model in memory, or on its way there or out: its engine, and what else it takes to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from quantd.daemon.chat_format import ChatFormat
from quantd.daemon.embedding_head import EmbeddingHead
from quantd.daemon.infill_formats import infill_writer
from quantd.daemon.keep_alive import KeepAlive
from quantd.daemon.preset import Preset
from quantd.daemon.pulse import Pulse
from quantd.daemon.templates import ChatTemplate
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.config import EngineConfig
from quantd.engine.errors import EngineDiedError
from quantd.engine.messages import ModelInfo, Stats
from quantd.engine.request import Request, TokenEvent

Progress = Callable[[int, int], None]
State = Literal["loading", "ready", "unloading"]
# Of the threads that all models share.
_PROMPTS_AT_ONCE = 4


class Engine(Protocol):
    """A running engine process, as `quantd.engine.client.EngineClient` is one."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def pid(self) -> int: ...

    @property
    def died(self) -> asyncio.Future[str]: ...

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]: ...

    @property
    def unbegun(self) -> Sequence[tuple[str, float]]: ...

    def forget(self, prompt: Sequence[int], salt: str) -> None: ...

    async def drop(self, keys: Sequence[bytes] | None) -> None: ...

    async def stats(self, detail: bool = False) -> Stats: ...

    def kill(self, reason: str) -> None: ...

    async def close(self) -> None: ...


class LoadedModel:
    """A model that answers.

    folder: where its files lie. defaults: what its author says of sampling, as fields of SamplingParams for
    requests that leave them open. preset: what else it brings to them. head: how it embeds. chat: how it
    chats, if it does, and tool_chat with tools. infill: writes its prompts towards a suffix, if it knows any.
    pulse: looks after the engine. num_requests: those that hold it. used: when one did last, on the monotonic
    clock. prompting, guests: to be held while a prompt is made by the model's own template, or by a client's,
    which may take long.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        engine: Engine,
        tokenizer: Tokenizer,
        defaults: Mapping[str, float],
        preset: Preset,
        head: EmbeddingHead,
        keep_alive: KeepAlive,
        pulse: Pulse,
    ) -> None:
        self.name = name
        self.folder = folder
        self.engine = engine
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.preset = preset
        self.head = head
        self.keep_alive = keep_alive
        self.pulse = pulse
        self.chat = _chat_format(tokenizer.template, tokenizer)
        self.tool_chat = _chat_format(tokenizer.tool_template, tokenizer) or self.chat
        self.infill = infill_writer(tokenizer)
        self.num_requests = 0
        self.prompting = asyncio.Semaphore(_PROMPTS_AT_ONCE)
        self.guests = asyncio.Semaphore(1)
        self.used = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def context_len(self) -> int:
        """Tokens, prompt and answer, that a request may have which does not ask for more itself."""
        served, own = self.engine.info.max_request_len, self.preset.context_len
        return served if own is None else min(served, own)

    def sampling_defaults(self, usual: Mapping[str, float]) -> dict[str, float]:
        """SamplingParams fields for what a request leaves open; `usual` where no author says."""
        return {**(self.defaults or usual), **self.preset.sampling}

    def acquire(self) -> None:
        """Keep the model in memory until `release`."""
        self.num_requests += 1
        self._idle.clear()
        self.keep_alive.stop()
        self.pulse.start()

    def release(self, stay: float | None = None) -> None:
        """One request holds the model no more, and asks for it to stay so many seconds (see KeepAlive)."""
        self.num_requests -= 1
        self.used = time.monotonic()
        self.keep_alive.ask(stay)
        if not self.num_requests:
            self._idle.set()
            self.pulse.stop()
            self.keep_alive.start()

    async def wait_idle(self) -> None:
        """Return once no request holds the model."""
        await self._idle.wait()


def _chat_format(template: ChatTemplate | None, tokenizer: Tokenizer) -> ChatFormat | None:
    return None if template is None else ChatFormat(template, tokenizer)


class ModelEntry:
    """A model on its way into memory, in it, or on its way out.

    progress: (done, total) bytes of weights. note: what the load waits for, if it does. waiting: since when
    each request waits for the load, on the monotonic clock.
    """

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.config = config
        self.state: State = "loading"
        self.progress = (0, 0)
        self.note = ""
        self.waiting: list[float] = []
        self.load: asyncio.Task[LoadedModel]
        self.unload: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()
        self._watchers: set[asyncio.Queue[None]] = set()

    @property
    def model(self) -> LoadedModel | None:
        """The model, once it is loaded."""
        failed = not self.load.done() or self.load.cancelled() or self.load.exception()
        return None if failed else self.load.result()

    async def loaded(self) -> LoadedModel:
        """Wait for the load; the waiter's own end does not end it. Raises what the load raised."""
        await asyncio.wait({self.load})
        if self.load.cancelled():
            raise EngineDiedError(f"{self.name} was unloaded while it was being loaded")
        return self.load.result()

    async def awaited(self) -> LoadedModel:
        """As `loaded`, for a request."""
        since = time.monotonic()
        self.waiting.append(since)
        try:
            return await self.loaded()
        finally:
            self.waiting.remove(since)

    def say(self, note: str) -> None:
        """Note what the load waits for."""
        self.note = note
        self._wake()

    def report(self, done: int, total: int) -> None:
        """Note how far the load is."""
        self.progress = (done, total)
        self._wake()

    def _wake(self) -> None:
        for watcher in self._watchers:
            if watcher.empty():
                watcher.put_nowait(None)

    async def watch(self) -> AsyncIterator[tuple[int, int]]:
        """The progress now and after each change, until the load is over."""
        watcher: asyncio.Queue[None] = asyncio.Queue()
        self._watchers.add(watcher)
        self.load.add_done_callback(lambda _: self._wake())
        try:
            while not self.load.done():
                yield self.progress
                await watcher.get()
        finally:
            self._watchers.discard(watcher)
