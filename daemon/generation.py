"""A running answer: the deltas of all its choices, as their engine requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Protocol

from quantd.daemon.activity import RequestRecord, cancelled
from quantd.daemon.choice import Choice
from quantd.daemon.deltas import Delta, Head, Usage
from quantd.daemon.errors import GenerationError
from quantd.daemon.metrics import Metrics
from quantd.engine.request import Request, TokenEvent


class TokenSource(Protocol):
    """What gives the tokens: an engine."""

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]: ...


# What an alarm puts among the deltas.
_SILENCE = Delta(index=-1)


class _Alarm:
    """Tells a queue of every `seconds` in which nothing was heard. One timer, whatever is heard."""

    def __init__(self, seconds: float, queue: asyncio.Queue[Delta | Exception]) -> None:
        self._seconds = seconds
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._timer = self._loop.call_at(self._heard + seconds, self._ring)

    def heard(self) -> None:
        """Note that something was."""
        self._heard = self._loop.time()

    def close(self) -> None:
        """Be silent from now on."""
        self._timer.cancel()

    def _ring(self) -> None:
        now = self._loop.time()
        if now >= self._heard + self._seconds:
            self._heard = now
            self._queue.put_nowait(_SILENCE)
        self._timer = self._loop.call_at(self._heard + self._seconds, self._ring)


class Generation:
    """An answer under way: an async iterator of Delta, and an async context that ends it.

    Leaving the context aborts what still runs. jobs: the engine request of each choice, n in a row for each
    prompt. record: of the client's request that this answers. on_close: called once at the end.
    """

    def __init__(
        self,
        head: Head,
        source: TokenSource,
        jobs: Sequence[tuple[Request, Choice]],
        n: int,
        metrics: Metrics,
        record: RequestRecord,
        on_close: Callable[[], None],
        load_seconds: float = 0.0,
    ) -> None:
        self.head = head
        self._source = source
        self._jobs = jobs
        self._n = n
        self._on_close = on_close
        self._load_seconds = load_seconds
        observer = metrics.of(head.model)
        self._works = [record.begin(request, observer) for request, _ in jobs]
        self._unfinished = len(jobs)
        self._ready: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(request, choice)) for request, choice in jobs]
        record.on_cancel(self._cancel)

    @property
    def num_choices(self) -> int:
        return len(self._jobs)

    @property
    def usage(self) -> Usage:
        """So far; complete once the iteration is over."""
        latest = max(work.latest for work in self._works)
        first = min((work.first for work in self._works if work.first is not None), default=latest)
        return Usage(
            prompt_tokens=self.head.prompt_tokens,
            completion_tokens=sum(choice.num_tokens for _, choice in self._jobs),
            cached_tokens=sum(choice.num_cached for _, choice in self._jobs[:: self._n]),
            load_seconds=self._load_seconds,
            prompt_seconds=first - self._works[0].started,
            decode_seconds=latest - first,
            reasoning_tokens=sum(choice.num_reasoning for _, choice in self._jobs),
        )

    def usage_of(self, index: int) -> Usage:
        """That of one choice so far."""
        (request, choice), work = self._jobs[index], self._works[index]
        return Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=choice.num_tokens,
            cached_tokens=choice.num_cached,
            load_seconds=self._load_seconds,
            prompt_seconds=work.prompt_seconds,
            decode_seconds=work.decode_seconds,
            reasoning_tokens=choice.num_reasoning,
        )

    def request(self, index: int) -> Request:
        """What an engine was asked for a choice."""
        return self._jobs[index][0]

    def prompt_text(self, index: int) -> str:
        """The prompt of a choice, special tokens by name."""
        request, choice = self._jobs[index]
        return choice.tokenizer.decode(request.prompt, special=True)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not self._unfinished:
            raise StopAsyncIteration
        return self._taken(await self._ready.get())

    def _taken(self, item: Delta | Exception) -> Delta:
        if isinstance(item, Exception):
            raise item
        self._unfinished -= item.finish_reason is not None
        return item

    async def batches(self, silence: float) -> AsyncGenerator[list[Delta]]:
        """The iteration, all that is ready at a time; an empty list after `silence` seconds without any."""
        alarm = _Alarm(silence, self._ready)
        try:
            while self._unfinished:
                item = await self._ready.get()
                if item is _SILENCE:
                    yield []
                    continue
                alarm.heard()
                items = [item]
                while not self._ready.empty():
                    items.append(self._ready.get_nowait())
                deltas = [item for item in items if isinstance(item, Delta) and item is not _SILENCE]
                if deltas:
                    yield [self._taken(delta) for delta in deltas]
                for error in items:
                    if isinstance(error, Exception):
                        raise error
        finally:
            alarm.close()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._on_close()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._ready.put_nowait(cancelled())

    async def _pump(self, request: Request, choice: Choice) -> None:
        work = self._works[choice.index]
        reason, told = "abort", None
        try:
            for delta in choice.start():
                self._ready.put_nowait(delta)
            async with aclosing(self._source.generate(request)) as events:
                async for event in events:
                    work.note(event)
                    for delta in choice.feed(event):
                        self._ready.put_nowait(delta)
                        reason = delta.finish_reason or reason
                    if choice.finished:
                        break
            if not choice.finished:
                raise GenerationError("the engine ended the request without a reason")
        # The boundary of a request: whatever happens in it is told to its reader and to no one else.
        except Exception as error:
            reason, told = "error", str(error)
            self._ready.put_nowait(error)
        finally:
            work.end(reason, told)
