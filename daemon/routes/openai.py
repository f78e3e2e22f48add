"""OpenAI's surface: chat/completions, completions, models; and Mistral's fim/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.generation import collect
from quantd.daemon.routes.keys import SERVICE, TIMING
from quantd.daemon.routes.route import Route
from quantd.daemon.service import InfillRequest, Service
from quantd.daemon.wire import openai
from quantd.daemon.wire.body import parse
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.openai_request import ChatBody, CompletionBody, FimBody
from quantd.daemon.wire.stream import send_stream


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    body = parse(await request.read(), ChatBody)
    starting, scored = request.app[SERVICE].chat(body.neutral()), bool(body.logprobs)
    if body.streams:
        frames = openai.ChatStream(scored, body.wants_usage)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        answers = await collect(generation)
        return json_response(openai.chat_reply(generation.head, answers, scored, generation.usage))


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    body = parse(await request.read(), CompletionBody)
    service, asked, scored = request.app[SERVICE], body.neutral(), body.logprobs is not None
    starting = service.infill(asked) if isinstance(asked, InfillRequest) else service.complete(asked)
    if body.streams:
        frames = openai.CompletionStream(scored, body.wants_usage)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        answers = await collect(generation)
        return json_response(openai.completion_reply(generation.head, answers, scored, generation.usage))


async def fim_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/fim/completions: Mistral's path; the answer has the shape of a chat's."""
    body = parse(await request.read(), FimBody)
    starting = request.app[SERVICE].infill(body.neutral())
    if body.streams:
        frames = openai.ChatStream(False, body.wants_usage)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        answers = await collect(generation)
        return json_response(openai.chat_reply(generation.head, answers, False, generation.usage))


async def list_models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models"""
    return json_response({"object": "list", "data": _model_objects(request.app[SERVICE])})


async def show_model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{id}, where the id may hold / and :"""
    name = request.match_info["id"].rstrip("/")
    for entry in _model_objects(request.app[SERVICE]):
        if entry["id"] == name:
            return json_response(entry)
    raise ModelNotFoundError(f"no model {name!r} is here; quantd list shows those that are")


def _model_objects(service: Service) -> list[dict[str, Any]]:
    loaded = {entry.name: entry.model for entry in service.models.entries}
    lengths = {name: model.engine.info.max_request_len for name, model in loaded.items() if model}
    return [
        openai.model_object(stored.name, int(stored.created), lengths.get(stored.name))
        for stored in service.models.store.list()
    ]


OPENAI_ROUTES: Sequence[Route] = (
    Route("POST", "/chat/completions", chat_completions, versioned=True),
    Route("POST", "/completions", completions, versioned=True),
    Route("POST", "/fim/completions", fim_completions, versioned=True),
    Route("GET", "/models", list_models, versioned=True),
    Route("GET", "/models/{id:.+}", show_model, versioned=True),
)
