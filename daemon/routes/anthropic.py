"""Anthropic's surface: messages, count_tokens, and its form of models."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.routes.content import Content, events_of, json_of
from quantd.daemon.routes.keys import TIMING, service_of
from quantd.daemon.routes.route import MODEL_REFUSALS, Handler, Route
from quantd.daemon.sections import collect_sections
from quantd.daemon.wire import anthropic
from quantd.daemon.wire.anthropic_replies import MESSAGE_EVENTS, MessageObject, TokenCount
from quantd.daemon.wire.anthropic_request import CountBody, MessagesBody
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.stream import send_stream


async def messages(request: web.Request, body: MessagesBody) -> web.StreamResponse:
    """POST /v1/messages"""
    starting = service_of(request).chat(body.neutral())
    if body.streams:
        frames = anthropic.MessageStream(body.caches)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        sections = await collect_sections(generation)
        reply = anthropic.message_object(generation.head, sections, generation.usage, body.caches)
        return json_response(reply)


async def count_tokens(request: web.Request, body: CountBody) -> web.StreamResponse:
    """POST /v1/messages/count_tokens"""
    prompt = await service_of(request).prompt(body.neutral())
    return json_response({"input_tokens": len(prompt.ids)})


def _route(path: str, handler: Handler, body: type[msgspec.Struct], *contents: Content) -> Route:
    return Route(
        "POST",
        path,
        handler,
        Scope.INFER,
        body,
        versioned=True,
        errors=anthropic.error_object,
        contents=contents,
        refusals=MODEL_REFUSALS,
    )


ANTHROPIC_ROUTES: Sequence[Route] = (
    _route("/messages", messages, MessagesBody, json_of(MessageObject), events_of(*MESSAGE_EVENTS)),
    _route("/messages/count_tokens", count_tokens, CountBody, json_of(TokenCount)),
)
