"""OpenAI's surface: chat/completions, completions, embeddings; and Mistral's fim/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.answers import collect
from quantd.daemon.requests import InfillRequest
from quantd.daemon.routes.content import Content, events_until_done, json_of
from quantd.daemon.routes.keys import TIMING, service_of
from quantd.daemon.routes.route import MODEL_REFUSALS, Handler, Route
from quantd.daemon.wire import openai
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.openai_embeddings import EmbeddingBody
from quantd.daemon.wire.openai_replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    EmbeddingList,
)
from quantd.daemon.wire.openai_request import ChatBody, CompletionBody, FimBody
from quantd.daemon.wire.stream import send_stream


async def chat_completions(request: web.Request, body: ChatBody) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    starting, scored = service_of(request).chat(body.neutral()), bool(body.logprobs)
    if body.streams:
        frames = openai.ChatStream(scored, body.wants_usage, body.names_function)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        answers = await collect(generation)
        head, usage = generation.head, generation.usage
        return json_response(openai.chat_reply(head, answers, scored, usage, body.names_function))


async def completions(request: web.Request, body: CompletionBody) -> web.StreamResponse:
    """POST /v1/completions"""
    service, asked, scored = service_of(request), body.neutral(), body.logprobs is not None
    starting = service.infill(asked) if isinstance(asked, InfillRequest) else service.complete(asked)
    if body.streams:
        frames = openai.CompletionStream(scored, body.wants_usage)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        answers = await collect(generation)
        return json_response(openai.completion_reply(generation.head, answers, scored, generation.usage))


async def fim_completions(request: web.Request, body: FimBody) -> web.StreamResponse:
    """POST /v1/fim/completions: Mistral's path; the answer has the shape of a chat's."""
    starting = service_of(request).infill(body.neutral())
    if body.streams:
        frames = openai.ChatStream(False, body.wants_usage)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        answers = await collect(generation)
        return json_response(openai.chat_reply(generation.head, answers, False, generation.usage))


async def embeddings(request: web.Request, body: EmbeddingBody) -> web.StreamResponse:
    """POST /v1/embeddings"""
    found = await service_of(request).embed(body.neutral())
    # Many vectors are megabytes of numbers, which take a while to write.
    return await asyncio.to_thread(lambda: json_response(body.reply(found)))


def _route(path: str, handler: Handler, body: type[msgspec.Struct], *contents: Content) -> Route:
    return Route(
        "POST",
        path,
        handler,
        Scope.INFER,
        body,
        versioned=True,
        contents=contents,
        refusals=MODEL_REFUSALS,
    )


_CHAT = json_of(ChatCompletion), events_until_done(ChatChunk)
_COMPLETION = json_of(Completion), events_until_done(CompletionChunk)

OPENAI_ROUTES: Sequence[Route] = (
    _route("/chat/completions", chat_completions, ChatBody, *_CHAT),
    _route("/completions", completions, CompletionBody, *_COMPLETION),
    _route("/fim/completions", fim_completions, FimBody, *_CHAT),
    _route("/embeddings", embeddings, EmbeddingBody, json_of(EmbeddingList)),
)
