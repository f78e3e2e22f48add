"""Anthropic's surface: messages, count_tokens, and its form of models."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from quantd.daemon.routes.keys import SERVICE, TIMING
from quantd.daemon.routes.route import Route
from quantd.daemon.sections import collect_sections
from quantd.daemon.wire import anthropic
from quantd.daemon.wire.anthropic_request import CountBody, MessagesBody
from quantd.daemon.wire.body import read_body
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.stream import send_stream


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages"""
    body = await read_body(request, MessagesBody)
    starting = request.app[SERVICE].chat(body.neutral())
    if body.streams:
        frames = anthropic.MessageStream(body.caches)
        return await send_stream(request, starting, frames, request.app[TIMING])
    async with await starting as generation:
        sections = await collect_sections(generation)
        reply = anthropic.message_object(generation.head, sections, generation.usage, body.caches)
        return json_response(reply)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens"""
    body = await read_body(request, CountBody)
    prompt = await request.app[SERVICE].prompt(body.neutral())
    return json_response({"input_tokens": len(prompt.ids)})


ANTHROPIC_ROUTES: Sequence[Route] = tuple(
    Route("POST", path, handler, versioned=True, errors=anthropic.error_object)
    for path, handler in (("/messages", messages), ("/messages/count_tokens", count_tokens))
)
