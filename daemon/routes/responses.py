"""OpenAI's Responses: made at once, streamed or in the background; looked up, cancelled and deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from quantd.daemon.errors import PreviousResponseError, ResponseNotFoundError
from quantd.daemon.requests import ChatRequest
from quantd.daemon.response_store import Item, ResponseStore, StoredResponse
from quantd.daemon.routes.keys import BACKGROUND, RESPONSES, SERVICE, TIMING
from quantd.daemon.routes.route import MODEL_REFUSALS, SSE, Route
from quantd.daemon.sections import Sections, collect_sections
from quantd.daemon.service import Service
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.responses import Reply, item_page
from quantd.daemon.wire.responses_input import input_items
from quantd.daemon.wire.responses_request import CountBody, ItemQuery, ResponsesBody
from quantd.daemon.wire.responses_stream import ResponseStream
from quantd.daemon.wire.stream import send_stream
from quantd.engine.errors import ContextLengthError, RequestError

Keep = Callable[[dict[str, Any]], None]
"""Takes a response in a state that its client may come back to."""


async def create(request: web.Request, body: ResponsesBody) -> web.StreamResponse:
    """POST /v1/responses"""
    service, store, reply = request.app[SERVICE], request.app[RESPONSES], Reply(body)
    items, num_earlier = _conversation(body, reply.key, store)
    asked = body.neutral(items, num_earlier)

    def keep(response: dict[str, Any]) -> None:
        if body.stored:
            store.put(StoredResponse(response, items))

    if body.background:
        response = reply.in_progress()
        keep(response)
        request.app[BACKGROUND].start(reply.id, _answer_later(service, asked, reply, keep))
        return json_response(response)
    if body.streams:
        return await _stream(request, asked, ResponseStream(reply, keep))
    return json_response(await _answer(service, asked, reply, keep))


def _conversation(body: CountBody, key: str, store: ResponseStore) -> tuple[list[Item], int]:
    """All items that a response answers, and how many of them its request did not bring."""
    earlier = [] if body.previous_response_id is None else _earlier(body.previous_response_id, store)
    return [*earlier, *input_items(body.input or [], key, store)], len(earlier)


def _earlier(id: str, store: ResponseStore) -> list[Item]:
    """The items of a response that is to be gone on from."""
    try:
        stored = store.get(id)
    except ResponseNotFoundError as error:
        raise PreviousResponseError(f"previous_response_id: {error}", "previous_response_id") from None
    if stored.response["status"] == "in_progress":
        raise RequestError(f"previous_response_id: {id} is still in progress", "previous_response_id")
    return stored.conversation


async def _answer(service: Service, asked: ChatRequest, reply: Reply, keep: Keep) -> dict[str, Any]:
    async with await service.chat(asked) as generation:
        reply.started(generation.head)
        response = reply.finished(await collect_sections(generation), generation.usage)
    keep(response)
    return response


async def _answer_later(service: Service, asked: ChatRequest, reply: Reply, keep: Keep) -> None:
    try:
        await _answer(service, asked, reply, keep)
    # The boundary of a request whose client has its answer already.
    except Exception as error:
        keep(reply.failed(error, Sections()))


async def _stream(request: web.Request, asked: ChatRequest, frames: ResponseStream) -> web.StreamResponse:
    try:
        return await send_stream(request, request.app[SERVICE].chat(asked), frames, request.app[TIMING])
    except ContextLengthError as error:
        # Codex compacts a conversation that is too long for this event, and gives up for a status of 400.
        body = b"".join(frames.error(error))
        return web.Response(body=body, headers={"Content-Type": frames.content_type})


async def count_input_tokens(request: web.Request, body: CountBody) -> web.StreamResponse:
    """POST /v1/responses/input_tokens"""
    items, num_earlier = _conversation(body, "counted", request.app[RESPONSES])
    prompt = await request.app[SERVICE].prompt(body.neutral(items, num_earlier))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def retrieve(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}"""
    if request.query.get("stream", "false") != "false":
        raise RequestError("stream: a response that is over cannot be streamed again", "stream")
    return json_response(_stored(request).response)


async def cancel(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/{id}/cancel: of one in the background; one that is over stays as it is."""
    stored = _stored(request)
    response = stored.response
    if not response["background"]:
        raise RequestError(
            "only a response in the background can be cancelled; close the connection of others"
        )
    if await request.app[BACKGROUND].cancel(response["id"]):
        request.app[RESPONSES].put(StoredResponse(response | {"status": "cancelled"}, stored.input))
    return json_response(_stored(request).response)


async def delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/responses/{id}: one in the background ends, too."""
    id = _stored(request).response["id"]
    await request.app[BACKGROUND].cancel(id)
    request.app[RESPONSES].delete(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def list_input_items(request: web.Request, query: ItemQuery) -> web.StreamResponse:
    """GET /v1/responses/{id}/input_items"""
    return json_response(item_page(_stored(request).input, query))


def _stored(request: web.Request) -> StoredResponse:
    return request.app[RESPONSES].get(request.match_info["id"])


RESPONSES_ROUTES: Sequence[Route] = (
    Route(
        "POST",
        "/responses",
        create,
        ResponsesBody,
        versioned=True,
        contents=SSE,
        refusals=MODEL_REFUSALS,
    ),
    Route(
        "POST",
        "/responses/input_tokens",
        count_input_tokens,
        CountBody,
        versioned=True,
        refusals=MODEL_REFUSALS,
    ),
    Route("GET", "/responses/{id}", retrieve, versioned=True),
    Route("DELETE", "/responses/{id}", delete, versioned=True),
    Route("POST", "/responses/{id}/cancel", cancel, versioned=True),
    Route("GET", "/responses/{id}/input_items", list_input_items, query=ItemQuery, versioned=True),
)
