"""Embedding: what is asked of it, and the way of one request's texts through an engine.

The texts go in order, and only so many at a time as fill the engine's steps: who comes meanwhile does not
wait behind all of them.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from quantd.daemon.activity import Observer, Progress, RequestRecord
from quantd.daemon.deltas import Usage
from quantd.daemon.errors import GenerationError
from quantd.daemon.generation import TokenSource
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.errors import ContextLengthError, RequestError
from quantd.engine.messages import ModelInfo
from quantd.engine.request import EmbeddingParams, Request, SamplingParams, TokenEvent
from quantd.kernels.errors import QuantdError

MOST_AT_ONCE = 64
"""Texts of one request that an engine has at a time."""

_TOKENS_AT_ONCE = 2048  # four steps' worth


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """Texts or token ids to embed.

    dimensions: how many of a vector's elements, from the first on; None for all. normalize: whether vectors
    have length 1; None: as the model's files say. truncate: cut what is too long, where else it is refused.
    context_len: tokens that a text may have at most, if fewer than the model's. keep_alive: seconds that the
    model is to stay in memory afterwards, see KeepAlive.
    """

    model: str | None
    inputs: Sequence[str | list[int]]
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: bool = False
    context_len: int | None = None
    keep_alive: float | None = None


@dataclass(frozen=True)
class Embeddings:
    """One vector for each input, in their order: the bytes of little-endian float32."""

    model: str
    vectors: Sequence[bytes]
    usage: Usage


def floats(vector: bytes) -> tuple[float, ...]:
    """The elements of a vector."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def token_ids(tokenizer: Tokenizer, request: EmbeddingRequest, limit: int) -> list[list[int]]:
    """The tokens of each input; cut to `limit` and the request's own bound if it wants that."""
    bound = limit if request.context_len is None else min(limit, request.context_len)
    max_len = bound if request.truncate else None
    return [
        tokenizer.encode_framed(item, max_len) if isinstance(item, str) else item[:max_len]
        for item in request.inputs
    ]


def engine_requests(
    info: ModelInfo,
    id: str,
    prompts: Sequence[list[int]],
    params: EmbeddingParams,
    context_len: int | None,
    salt: str,
) -> list[Request]:
    """An engine's request for each prompt, all of the same salt.

    Raises RequestError, ContextLengthError, naming the input.
    """
    sampling = SamplingParams(max_tokens=0)
    requests = [
        Request(id=f"{id}-{index}", prompt=prompt, sampling=sampling, salt=salt, embedding=params)
        for index, prompt in enumerate(prompts)
    ]
    for index, request in enumerate(requests):
        _check(info, request, context_len, f"input[{index}]")
    return requests


def _check(info: ModelInfo, request: Request, context_len: int | None, name: str) -> None:
    try:
        info.check_request(request, context_len)
    except ContextLengthError as error:
        told = ContextLengthError(error.prompt_len, error.limit, f"{name}: {error}")
        told.param = "input"
        raise told from None
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(f"{name}: {error}", "input") from None


async def embed(
    source: TokenSource,
    requests: Sequence[Request],
    at_once: int,
    record: RequestRecord,
    observer: Observer,
) -> list[TokenEvent]:
    """The events with the vectors, in order; never more than `at_once` are under way.

    record: of the client's request. observer: told of each text.
    Raises GenerationError or EngineDiedError; what still runs is aborted then.
    """
    window = _Window(_TOKENS_AT_ONCE)
    # A text counts as some tokens at least, so that the short ones are not too many.
    least = _TOKENS_AT_ONCE // max(at_once, 1)

    async def run(request: Request, cost: int) -> TokenEvent:
        try:
            return await _embed_one(source, request, record.begin(request, observer))
        finally:
            window.leave(cost)

    tasks: list[asyncio.Task[TokenEvent]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                cost = max(len(request.prompt), least)
                await window.enter(cost)
                tasks.append(group.create_task(run(request, cost)))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class _Window:
    """Lets texts through in order while few tokens are under way; one that is alone always."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._freed = asyncio.Event()

    async def enter(self, cost: int) -> None:
        while self._taken and self._taken + cost > self._size:
            self._freed.clear()
            await self._freed.wait()
        self._taken += cost

    def leave(self, cost: int) -> None:
        self._taken -= cost
        self._freed.set()


async def _embed_one(source: TokenSource, request: Request, work: Progress) -> TokenEvent:
    reason, told = "abort", None
    try:
        async with aclosing(source.generate(request)) as events:
            async for event in events:
                work.note(event)
                if event.embedding is not None:
                    reason = "stop"
                    return event
                if event.finish_reason is not None:
                    raise GenerationError(event.error or "the engine ended the request")
        raise GenerationError("the engine ended the request without a reason")
    except QuantdError as error:
        reason, told = "error", str(error)
        raise
    finally:
        work.end(reason, told)
