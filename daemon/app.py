"""The daemon's HTTP routes: one table, plain handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from quantd.daemon.control import CONTROL, Control, control_routes
from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.generation import collect
from quantd.daemon.guard import refuse_foreign_sites
from quantd.daemon.service import Service
from quantd.daemon.wire import openai
from quantd.daemon.wire.errors import answer_errors, json_response
from quantd.daemon.wire.openai_request import ChatBody, CompletionBody, parse
from quantd.daemon.wire.stream import DEFAULT_TIMING, Timing, send_stream

MAX_BODY = 64 * 2**20

SERVICE = web.AppKey("service", Service)
_TIMING = web.AppKey("timing", Timing)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: Service, control: Control, timing: Timing = DEFAULT_TIMING) -> web.Application:
    """The whole surface over one service. Paths work with and without /v1, and with a slash at the end."""
    app = web.Application(middlewares=[answer_errors, refuse_foreign_sites], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app[CONTROL] = control
    app[_TIMING] = timing
    for method, path, handler in _ROUTES:
        _add_route(app, method, f"/v1{path}", handler)
        _add_route(app, method, path, handler)
    for method, path, handler in (*control_routes(), ("GET", "/metrics", metrics)):
        _add_route(app, method, path, handler)
    return app


def _add_route(app: web.Application, method: str, path: str, handler: Handler) -> None:
    """With GET comes HEAD, which monitors ask with (RFC 9110, section 9.1)."""
    path += "{_:/?}"
    if method == "GET":
        app.router.add_get(path, handler, allow_head=True)
    else:
        app.router.add_route(method, path, handler)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    body = parse(await request.read(), ChatBody)
    generation = await request.app[SERVICE].chat(body.neutral())
    async with generation:
        id, scored = f"chatcmpl-{generation.id}", bool(body.logprobs)
        if body.streams:
            frames = openai.ChatStream(id, generation.model, generation.num_choices, scored, body.wants_usage)
            return await send_stream(request, generation, frames, request.app[_TIMING])
        answers = await collect(generation)
        return json_response(openai.chat_reply(id, generation.model, answers, scored, generation.usage))


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    body = parse(await request.read(), CompletionBody)
    generation = await request.app[SERVICE].complete(body.neutral())
    async with generation:
        id, scored = f"cmpl-{generation.id}", body.logprobs is not None
        if body.streams:
            frames = openai.CompletionStream(
                id, generation.model, generation.num_choices, scored, body.wants_usage
            )
            return await send_stream(request, generation, frames, request.app[_TIMING])
        answers = await collect(generation)
        return json_response(openai.completion_reply(id, generation.model, answers, scored, generation.usage))


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


async def metrics(request: web.Request) -> web.StreamResponse:
    """GET /metrics"""
    service = request.app[SERVICE]
    page = service.metrics.render(await service.models.stats())
    return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _model_objects(service: Service) -> list[dict[str, Any]]:
    loaded = {entry.name: entry.model for entry in service.models.entries}
    lengths = {name: model.engine.info.max_request_len for name, model in loaded.items() if model}
    return [
        openai.model_object(stored.name, int(stored.created), lengths.get(stored.name))
        for stored in service.models.store.list()
    ]


_ROUTES: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/chat/completions", chat_completions),
    ("POST", "/completions", completions),
    ("GET", "/models", list_models),
    ("GET", "/models/{id:.+}", show_model),
)
