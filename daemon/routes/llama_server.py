"""llama-server's surface (llama.cpp, tools/server/README.md), for editors that speak it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.answers import collect
from quantd.daemon.embeddings import floats
from quantd.daemon.errors import NoInfillError, NotServedError
from quantd.daemon.generation import Generation
from quantd.daemon.routes.content import Content, events_of, json_of
from quantd.daemon.routes.keys import CONTROL, TIMING, service_of, slots_of
from quantd.daemon.routes.llama_server_slots import SLOT_ROUTES
from quantd.daemon.routes.route import MODEL_REFUSALS, Handler, Route
from quantd.daemon.wire import llama_server
from quantd.daemon.wire import llama_server_replies as replies
from quantd.daemon.wire.errors import Fault, json_response
from quantd.daemon.wire.llama_server_options import OptionFields
from quantd.daemon.wire.llama_server_request import (
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    InfillBody,
    PropsQuery,
    TokenizeBody,
)
from quantd.daemon.wire.openai_request import ChatBody
from quantd.daemon.wire.stream import send_stream
from quantd.engine.errors import RequestError


async def completion(request: web.Request, body: CompletionBody) -> web.StreamResponse:
    """POST /completion"""
    return await _answer(request, body, service_of(request).complete(body.neutral()))


async def infill(request: web.Request, body: InfillBody) -> web.StreamResponse:
    """POST /infill"""
    try:
        return await _answer(request, body, service_of(request).infill(body.neutral()))
    except NoInfillError as error:
        raise NotServedError(str(error)) from error


async def _answer(
    request: web.Request, body: OptionFields, starting: Coroutine[Any, Any, Generation]
) -> web.StreamResponse:
    async def start() -> Generation:
        generation = await starting
        if body.caches:
            slots_of(request).note(generation.head.model, body.slot, generation.request(0).prompt)
        frames.watch(generation)
        return generation

    frames = llama_server.CompletionStream(body)
    if body.streams:
        return await send_stream(request, start(), frames, request.app[TIMING])
    async with await start() as generation:
        return json_response(llama_server.Reply(body, generation).whole(await collect(generation)))


async def tokenize(request: web.Request, body: TokenizeBody) -> web.StreamResponse:
    """POST /tokenize"""
    async with service_of(request).model(body.model) as model:
        return json_response({"tokens": await asyncio.to_thread(body.tokens, model.tokenizer)})


async def detokenize(request: web.Request, body: DetokenizeBody) -> web.StreamResponse:
    """POST /detokenize"""
    async with service_of(request).model(body.model) as model:
        body.check(model.engine.info.vocab_size)
        text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, special=True)
        return json_response({"content": text})


async def apply_template(request: web.Request, body: ChatBody) -> web.StreamResponse:
    """POST /apply-template, whose body is that of /v1/chat/completions"""
    prompt = await service_of(request).prompt(body.neutral())
    return json_response({"prompt": prompt.text})


async def embedding(request: web.Request, body: EmbeddingBody) -> web.StreamResponse:
    """POST /embedding"""
    found = await service_of(request).embed(body.neutral())
    vectors = [{"index": index, "embedding": [floats(item)]} for index, item in enumerate(found.vectors)]
    return await asyncio.to_thread(json_response, vectors)


async def rerank(request: web.Request) -> web.StreamResponse:
    """POST /rerank"""
    raise NotServedError("this daemon has no reranking")


async def props(request: web.Request, query: PropsQuery) -> web.StreamResponse:
    """GET /props; a model that is not loaded is, unless ?autoload=false."""
    service = service_of(request)
    if query.autoload is False:
        _check_loaded(request, query.model)
    async with service.model(query.model) as model:
        entry = service.models.entry(model.name)
        return json_response(llama_server.props_object(model, entry.config, request.app[CONTROL].version))


def _check_loaded(request: web.Request, name: str | None) -> None:
    loaded = [entry.name for entry in service_of(request).models.entries if entry.model is not None]
    if not loaded or name not in (None, "default", *loaded):
        raise RequestError(f"{name or 'no model'} is not loaded", "model")


async def health(request: web.Request) -> web.StreamResponse:
    """GET /health: 503 as long as models load and none is ready yet; no model at all is no harm."""
    entries = service_of(request).models.entries
    if any(entry.state == "loading" for entry in entries) and not any(entry.model for entry in entries):
        return json_response(llama_server.llama_error(Fault(503, "Loading model")), 503)
    return json_response({"status": "ok"})


async def lora_adapters(request: web.Request) -> web.StreamResponse:
    """GET /lora-adapters: there are none."""
    return json_response([])


def _route(
    method: str,
    path: str,
    handler: Handler,
    *contents: Content,
    scope: Scope = Scope.INFER,
    body: type[msgspec.Struct] | None = None,
    **rest: Any,
) -> Route:
    errors = llama_server.llama_error
    return Route(method, path, handler, scope, body, contents=contents, errors=errors, **rest)


def _answers(path: str, handler: Handler, body: type[msgspec.Struct], *contents: Content) -> Route:
    return _route("POST", path, handler, *contents, body=body, refusals=MODEL_REFUSALS)


_COMPLETION = (
    json_of(replies.CompletionAnswer, list[replies.CompletionAnswer]),
    events_of(replies.CompletionPart, replies.CompletionAnswer),
)


LLAMA_SERVER_ROUTES: Sequence[Route] = (
    _route(
        "GET", "/health", health, json_of(replies.Health), scope=Scope.PUBLIC, versioned=True, refusals=(503,)
    ),
    _answers("/completion", completion, CompletionBody, *_COMPLETION),
    _route("POST", "/infill", infill, *_COMPLETION, body=InfillBody, refusals=(*MODEL_REFUSALS, 501)),
    _answers("/tokenize", tokenize, TokenizeBody, json_of(replies.Tokens)),
    _answers("/detokenize", detokenize, DetokenizeBody, json_of(replies.Content)),
    _answers("/apply-template", apply_template, ChatBody, json_of(replies.Prompt)),
    _answers("/embedding", embedding, EmbeddingBody, json_of(list[replies.EmbeddingEntry])),
    _route("POST", "/rerank", rerank, versioned=True, successes=(), refusals=(501,)),
    _route("POST", "/reranking", rerank, versioned=True, successes=(), refusals=(501,)),
    _route("GET", "/props", props, json_of(replies.Props), query=PropsQuery, refusals=MODEL_REFUSALS),
    _route("GET", "/lora-adapters", lora_adapters, json_of(list[replies.LoraAdapter])),
    *SLOT_ROUTES,
)
