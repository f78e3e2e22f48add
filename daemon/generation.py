"""A running answer: the token events of its engine requests turned into deltas of text.

Knows tokens, text and log probabilities; no models, templates or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, cast

from quantd.daemon.content_end import ContentEnd, End, Finish
from quantd.daemon.errors import GenerationError
from quantd.daemon.line_rules import LineLimit, LineRules
from quantd.daemon.metrics import Metrics
from quantd.daemon.output_parser import OutputParser, Piece, PlainOutput, ToolCallDelta, joined
from quantd.daemon.text import StopStrings
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.request import Request, TokenEvent, TokenLogprob


@dataclass(frozen=True)
class ScoredToken:
    """A token of the text with its log probability; None for the first of a prompt.

    data: the bytes that it adds to the text. shows: False for special tokens, which add none and have
    their name there. top: bytes and log probability of the likeliest, whose ids are top_ids. offset:
    characters before it.
    """

    data: bytes
    shows: bool
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int
    id: int = -1
    top_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delta:
    """The next piece of one choice: a part of its content, of its reasoning or of a tool call.

    The last one of each choice has its finish_reason, and stop_string where that ended it. token_ids: those
    drawn since the choice's last delta. num_prefilled: prompt tokens computed by now, in a delta without
    anything else, where asked.
    """

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish_reason: Finish | None = None
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None
    stop_string: str | None = None
    token_ids: tuple[int, ...] = ()
    num_prefilled: int | None = None


@dataclass(frozen=True)
class Head:
    """What is known of an answer when it starts.

    context_len: tokens, prompt and answer, that a choice may have. num_left_out: files that had no room in
    the prompt. prompt: the tokens of the first.
    """

    id: str
    model: str
    num_choices: int
    prompt_tokens: int
    context_len: int = 0
    num_left_out: int = 0
    prompt: Sequence[int] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens: each prompt counted once, all choices, what the prefix cache spared, those that reasoned.

    Seconds: until the model was loaded, from then to the first token, and from that to the last.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    load_seconds: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    reasoning_tokens: int = 0


class Echo:
    """A prompt that is repeated before its answer, with the log probabilities of its tokens where asked."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], text: str | None, scored: bool) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._scored = scored
        self._logprobs: list[TokenLogprob] = []
        detokenizer = tokenizer.detokenizer(at_start=True)
        parts = [detokenizer.feed(token_id) for token_id in ids]
        self._lengths = [len(part) for part in parts]
        self.text = "".join([*parts, detokenizer.flush()]) if text is None else text

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Take the entries of the next prompt positions."""
        self._logprobs.extend(logprobs)

    @property
    def complete(self) -> bool:
        """Whether all that was asked of the prompt is known."""
        return not self._scored or len(self._logprobs) >= len(self._ids) - 1

    def tokens(self) -> tuple[ScoredToken, ...]:
        """The prompt's tokens, if asked."""
        if not self._scored:
            return ()
        offset, scored = 0, []
        entries = [TokenLogprob(self._ids[0], 0.0), *self._logprobs]
        for place, (entry, length) in enumerate(zip(entries, self._lengths, strict=True)):
            scored.append(score(self._tokenizer, entry, offset, known=place > 0))
            offset += length
        return tuple(scored)


def score(tokenizer: Tokenizer, entry: TokenLogprob, offset: int, known: bool = True) -> ScoredToken:
    """An engine's entry in words."""
    return ScoredToken(
        data=tokenizer.token_bytes(entry.token_id),
        shows=tokenizer.has_text(entry.token_id),
        logprob=entry.logprob if known else None,
        top=tuple((tokenizer.token_bytes(token_id), logprob) for token_id, logprob in entry.top),
        offset=offset,
        id=entry.token_id,
        top_ids=tuple(token_id for token_id, _ in entry.top),
    )


class Choice:
    """One continuation as text. A token's entry goes out with the first of its text that does."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: StopStrings,
        scored: bool,
        echo: Echo | None = None,
        parser: OutputParser | None = None,
        lines: LineLimit | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning = 0
        self.num_cached = 0
        self.finished = False
        self._parser = parser or PlainOutput()
        self._calls_tools = False
        self.tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(shown=self._parser.shown)
        self._content = ContentEnd(stops, lines or LineRules().limit())
        self._scored = scored
        self._echo = echo
        self._decoded = 0 if echo is None else len(echo.text)
        self._waiting: deque[ScoredToken] = deque()
        self._new_ids: list[int] = []

    def start(self) -> list[Delta]:
        """What can be said before any event."""
        if self._echo is None or not self._echo.complete:
            return []
        echo, self._echo = self._echo, None
        return [Delta(self.index, echo.text, echo.tokens())]

    def feed(self, event: TokenEvent) -> list[Delta]:
        """The deltas that an event brings. Raises GenerationError where the engine gave the request up."""
        if event.finish_reason in ("error", "abort"):
            raise GenerationError(event.error or "the engine ended the request")
        self.num_tokens += len(event.token_ids)
        self.num_cached = event.num_cached or self.num_cached
        self._new_ids += event.token_ids
        if self._echo is not None:
            self._echo.add(event.prompt_logprobs)
        deltas = self.start()
        if event.num_computed is not None:
            deltas.append(Delta(self.index, num_prefilled=event.num_computed))
        pieces: list[Piece] = []
        end = self._take(event, pieces)
        if end is not None:
            return [*deltas, *self._finish(pieces, end)]
        if event.finish_reason is not None:
            return [*deltas, *self._finish(pieces, End(cast(Finish, event.finish_reason)))]
        return [*deltas, *self._deltas(pieces, self._release())]

    def _take(self, event: TokenEvent, pieces: list[Piece]) -> End | None:
        """Add the pieces that an event sets free; why they end the answer if so. A stop token has no text."""
        ids = event.token_ids[:-1] if event.finish_reason == "stop" else event.token_ids
        for place, token_id in enumerate(ids):
            if self._scored:
                self._waiting.append(score(self.tokenizer, event.logprobs[place], self._decoded))
            end = self._read(self._detokenizer.feed(token_id), pieces)
            if end is not None:
                return end
        if event.finish_reason is None:
            return None
        end = self._read(self._detokenizer.flush(), pieces) or self._add(self._parser.flush(), pieces)
        if end is None:
            pieces.append(Piece(self._content.release()))
        return end

    def _read(self, text: str, pieces: list[Piece]) -> End | None:
        """Add what a token's text sets free."""
        self._decoded += len(text)
        reasons = self._parser.in_reasoning
        end = self._add(self._parser.feed(text), pieces)
        self.num_reasoning += reasons or self._parser.in_reasoning
        return end

    def _add(self, new: Sequence[Piece], pieces: list[Piece]) -> End | None:
        """Add pieces to the end of the content, if that comes. Reasoning and calls have no such end."""
        for piece in new:
            if not piece.text:
                pieces += (Piece(self._content.release()), piece)
                continue
            text, end = self._content.feed(piece.text)
            pieces.append(Piece(text))
            if end is not None:
                return end
        return None

    def _deltas(self, pieces: Sequence[Piece], tokens: tuple[ScoredToken, ...]) -> list[Delta]:
        """A delta for each piece; the first of them has the tokens."""
        deltas = []
        for piece in joined(pieces) or ([Piece()] if tokens else []):
            self._calls_tools = self._calls_tools or piece.tool_call is not None
            deltas.append(
                Delta(
                    self.index,
                    piece.text,
                    tokens,
                    reasoning=piece.reasoning,
                    tool_call=piece.tool_call,
                    token_ids=self._take_ids(),
                )
            )
            tokens = ()
        return deltas

    def _take_ids(self) -> tuple[int, ...]:
        ids, self._new_ids = tuple(self._new_ids), []
        return ids

    def _finish(self, pieces: Sequence[Piece], end: End) -> list[Delta]:
        """The last deltas. Tokens are left out whose text was cut off."""
        self.finished = True
        is_whole = not self._content.num_held
        tokens = (*self._release(), *(self._waiting if is_whole else ()))
        deltas = self._deltas(pieces, tokens) or [Delta(self.index, token_ids=self._take_ids())]
        calls_tools = end.reason == "stop" and self._calls_tools
        reason: Finish = "tool_calls" if calls_tools else end.reason
        return [*deltas[:-1], replace(deltas[-1], finish_reason=reason, stop_string=end.stop_string)]

    def _release(self) -> tuple[ScoredToken, ...]:
        """The tokens of which some text is neither held back nor cut off."""
        released = self._decoded - self._content.num_held
        tokens = []
        while self._waiting and self._waiting[0].offset < released:
            tokens.append(self._waiting.popleft())
        return tuple(tokens)


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


class _Clock:
    """When a choice started, had its first token and its latest; seconds, of time.monotonic."""

    def __init__(self) -> None:
        self.started = self.latest = time.monotonic()
        self.first: float | None = None

    def note(self) -> None:
        """Note that a token came, or the end."""
        self.latest = time.monotonic()
        self.first = self.latest if self.first is None else self.first

    @property
    def prompt_seconds(self) -> float:
        """Until the first token, or until now."""
        return (time.monotonic() if self.first is None else self.first) - self.started

    @property
    def decode_seconds(self) -> float:
        """From the first token to the latest."""
        return 0.0 if self.first is None else self.latest - self.first


class Generation:
    """An answer under way: an async iterator of Delta, and an async context that ends it.

    Leaving the context aborts what still runs. jobs: the engine request of each choice, n in a row for each
    prompt. on_close: called once at the end.
    """

    def __init__(
        self,
        head: Head,
        source: TokenSource,
        jobs: Sequence[tuple[Request, Choice]],
        n: int,
        metrics: Metrics,
        on_close: Callable[[], None],
        load_seconds: float = 0.0,
    ) -> None:
        self.head = head
        self._source = source
        self._jobs = jobs
        self._n = n
        self._metrics = metrics
        self._on_close = on_close
        self._load_seconds = load_seconds
        self._clocks = [_Clock() for _ in jobs]
        self._unfinished = len(jobs)
        self._ready: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(request, choice)) for request, choice in jobs]

    @property
    def num_choices(self) -> int:
        return len(self._jobs)

    @property
    def usage(self) -> Usage:
        """So far; complete once the iteration is over."""
        latest = max(clock.latest for clock in self._clocks)
        first = min((clock.first for clock in self._clocks if clock.first is not None), default=latest)
        return Usage(
            prompt_tokens=self.head.prompt_tokens,
            completion_tokens=sum(choice.num_tokens for _, choice in self._jobs),
            cached_tokens=sum(choice.num_cached for _, choice in self._jobs[:: self._n]),
            load_seconds=self._load_seconds,
            prompt_seconds=first - self._clocks[0].started,
            decode_seconds=latest - first,
            reasoning_tokens=sum(choice.num_reasoning for _, choice in self._jobs),
        )

    def usage_of(self, index: int) -> Usage:
        """That of one choice so far."""
        (request, choice), clock = self._jobs[index], self._clocks[index]
        return Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=choice.num_tokens,
            cached_tokens=choice.num_cached,
            load_seconds=self._load_seconds,
            prompt_seconds=clock.prompt_seconds,
            decode_seconds=clock.decode_seconds,
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

    def _count(self, index: int) -> None:
        usage = self.usage_of(index)
        self._metrics.totals.add(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.prompt_seconds,
            usage.completion_tokens,
            usage.decode_seconds,
        )

    async def _pump(self, request: Request, choice: Choice) -> None:
        timer, clock = self._metrics.timer(self.head.model), self._clocks[choice.index]
        reason = "abort"
        try:
            for delta in choice.start():
                self._ready.put_nowait(delta)
            async with aclosing(self._source.generate(request)) as events:
                async for event in events:
                    timer.tokens(len(event.token_ids))
                    if event.token_ids or event.finish_reason is not None:
                        clock.note()
                    for delta in choice.feed(event):
                        self._ready.put_nowait(delta)
                        reason = delta.finish_reason or reason
                    if choice.finished:
                        break
            if not choice.finished:
                raise GenerationError("the engine ended the request without a reason")
        # The boundary of a request: whatever happens in it is told to its reader and to no one else.
        except Exception as error:
            reason = "error"
            self._ready.put_nowait(error)
        finally:
            timer.finish(reason)
            self._count(choice.index)


@dataclass
class ToolCall:
    """A whole call. arguments: a JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """One whole choice."""

    index: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: Finish | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_string: str | None = None
    token_ids: list[int] = field(default_factory=list)


async def collect(generation: Generation) -> list[Answer]:
    """The whole answer, as the fold of its deltas."""
    parts: list[list[Delta]] = [[] for _ in range(generation.num_choices)]
    async for delta in generation:
        parts[delta.index].append(delta)
    return [_fold(index, deltas) for index, deltas in enumerate(parts)]


def _fold(index: int, deltas: Sequence[Delta]) -> Answer:
    return Answer(
        index,
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        finish_reason=deltas[-1].finish_reason,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_fold_calls([delta.tool_call for delta in deltas if delta.tool_call is not None]),
        stop_string=deltas[-1].stop_string,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
    )


def _fold_calls(parts: Sequence[ToolCallDelta]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for part in parts:
        if part.index == len(calls):
            calls.append(ToolCall(part.id or "", part.name or ""))
        calls[part.index].arguments += part.arguments
    return calls
