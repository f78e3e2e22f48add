"""Ollama's surface: generate, chat, the models that there are and that run, and what its clients probe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.answers import collect
from quantd.daemon.durations import LONGEST
from quantd.daemon.generation import Generation
from quantd.daemon.loaded_model import LoadedModel, ModelEntry
from quantd.daemon.requests import ChatRequest, CompletionRequest, InfillRequest
from quantd.daemon.routes.content import Content, json_of, lines_of
from quantd.daemon.routes.keys import CARDS, TIMING, service_of
from quantd.daemon.routes.route import MODEL_REFUSALS, Handler, Route
from quantd.daemon.service import Service
from quantd.daemon.wire import ollama, ollama_models
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.ollama_embeddings import EmbedBody, EmbeddingsBody, embed_object, vector_json
from quantd.daemon.wire.ollama_library import ShowBody, required
from quantd.daemon.wire.ollama_replies import (
    ApiStatus,
    ApiVersion,
    ChatAnswer,
    EmbedAnswer,
    EmbeddingsAnswer,
    GenerateAnswer,
    ModelTags,
    RunningModels,
    ShownModel,
)
from quantd.daemon.wire.ollama_request import ChatBody, GenerateBody
from quantd.daemon.wire.stream import send_stream

# The Ollama whose routes these are; clients ask for some least version.
API_VERSION = "0.14.0"

# Too many requests are a busy server there.
_STATUSES = {429: 503}


async def generate(request: web.Request, body: GenerateBody) -> web.StreamResponse:
    """POST /api/generate"""
    return await _answer(request, body, ollama.generate_piece)


async def chat(request: web.Request, body: ChatBody) -> web.StreamResponse:
    """POST /api/chat"""
    return await _answer(request, body, ollama.chat_piece)


async def _answer(
    request: web.Request, body: GenerateBody | ChatBody, piece: ollama.Piece
) -> web.StreamResponse:
    service, model = service_of(request), required(body.model)
    card = await request.app[CARDS].get(model)
    if body.asks_nothing:
        reason = await _load_or_unload(service, model, body.stay)
        return json_response(ollama.done_object(model, piece(), reason))
    neutral = body.neutral(card.capabilities)
    continues = isinstance(body, GenerateBody) and isinstance(neutral, ChatRequest)
    telling = ollama.Telling(piece, model, bool(body.logprobs), continues)
    starting = _start(service, neutral)
    if body.streams:
        return await send_stream(request, starting, ollama.AnswerStream(telling), request.app[TIMING])
    async with await starting as generation:
        answers = await collect(generation)
        return json_response(ollama.reply(telling, generation.head, answers[0], generation.usage))


def _start(
    service: Service, request: ChatRequest | CompletionRequest | InfillRequest
) -> Coroutine[Any, Any, Generation]:
    match request:
        case ChatRequest():
            return service.chat(request)
        case CompletionRequest():
            return service.complete(request)
        case InfillRequest():
            return service.infill(request)


async def _load_or_unload(service: Service, model: str, stay: float | None) -> str:
    if stay == 0:
        await service.models.let_go(model)
        return "unload"
    await service.load(model, stay)
    return "load"


async def embed(request: web.Request, body: EmbedBody) -> web.StreamResponse:
    """POST /api/embed"""
    model, service = required(body.model), service_of(request)
    if not body.inputs:
        await _load_or_unload(service, model, body.stay)
        return json_response({"model": model, "embeddings": []})
    return json_response(embed_object(model, await service.embed(body.neutral())))


async def embeddings(request: web.Request, body: EmbeddingsBody) -> web.StreamResponse:
    """POST /api/embeddings"""
    model, service = required(body.model), service_of(request)
    if not body.inputs:
        await _load_or_unload(service, model, body.stay)
        return json_response({"embedding": []})
    found = await service.embed(body.neutral())
    return json_response({"embedding": vector_json(found.vectors[0])})


async def tags(request: web.Request) -> web.StreamResponse:
    """GET /api/tags: the models on disk, the latest first."""
    cards = sorted(await request.app[CARDS].all(), key=lambda card: -card.stored.created)
    return json_response({"models": [ollama_models.list_entry(card) for card in cards]})


async def show(request: web.Request, body: ShowBody) -> web.StreamResponse:
    """POST /api/show"""
    cards = request.app[CARDS]
    card = await cards.get(body.chosen)
    tensors = await asyncio.to_thread(card.tensors) if body.verbose else ()
    shown = ollama_models.show_object(card, body.chosen, cards.context_len(card), tensors)
    return json_response(shown)


async def running(request: web.Request) -> web.StreamResponse:
    """GET /api/ps: the models in memory."""
    entries = service_of(request).models.entries
    models = [await _running(request, entry, entry.model) for entry in reversed(entries) if entry.model]
    return json_response({"models": models})


async def _running(request: web.Request, entry: ModelEntry, model: LoadedModel) -> dict[str, Any]:
    cards = request.app[CARDS]
    card = await cards.get(entry.name)
    expires_at = time.time() + min(model.keep_alive.seconds_left, LONGEST)
    return ollama_models.running_entry(card, model, cards.context_len(card), expires_at)


async def version(request: web.Request) -> web.StreamResponse:
    """GET /api/version"""
    return json_response({"version": API_VERSION})


async def status(request: web.Request) -> web.StreamResponse:
    """GET /api/status: whether there is a cloud, which there is not."""
    return json_response({"cloud": {"disabled": True, "source": "config"}})


async def me(request: web.Request) -> web.StreamResponse:
    """POST /api/me: who is signed in, which nobody can be."""
    return json_response({"error": "unauthorized: there are no accounts here"}, 401)


def ollama_route(
    method: str,
    path: str,
    handler: Handler,
    scope: Scope,
    *contents: Content,
    body: type[msgspec.Struct] | None = None,
    **rest: Any,
) -> Route:
    """A route that tells errors as Ollama does."""
    errors = ollama.error_object
    return Route(
        method, path, handler, scope, body, contents=contents, errors=errors, statuses=_STATUSES, **rest
    )


def _answers(path: str, handler: Handler, body: type[msgspec.Struct], *contents: Content) -> Route:
    return ollama_route("POST", path, handler, Scope.INFER, *contents, body=body, refusals=MODEL_REFUSALS)


OLLAMA_ROUTES: Sequence[Route] = (
    _answers("/api/generate", generate, GenerateBody, json_of(GenerateAnswer), lines_of(GenerateAnswer)),
    _answers("/api/chat", chat, ChatBody, json_of(ChatAnswer), lines_of(ChatAnswer)),
    _answers("/api/embed", embed, EmbedBody, json_of(EmbedAnswer)),
    _answers("/api/embeddings", embeddings, EmbeddingsBody, json_of(EmbeddingsAnswer)),
    ollama_route("GET", "/api/tags", tags, Scope.INFER, json_of(ModelTags)),
    ollama_route(
        "POST", "/api/show", show, Scope.INFER, json_of(ShownModel), body=ShowBody, refusals=(404, 500)
    ),
    ollama_route("GET", "/api/ps", running, Scope.INFER, json_of(RunningModels)),
    ollama_route("GET", "/api/version", version, Scope.INFER, json_of(ApiVersion)),
    ollama_route("GET", "/api/status", status, Scope.INFER, json_of(ApiStatus)),
    ollama_route("POST", "/api/me", me, Scope.INFER, successes=(), refusals=(401,)),
)
