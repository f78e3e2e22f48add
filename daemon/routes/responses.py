"""OpenAI's Responses: made at once, streamed or in the background; looked up, cancelled and deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.broadcast import Broadcast
from quantd.daemon.errors import PreviousResponseError, ResponseNotFoundError
from quantd.daemon.generation import Generation
from quantd.daemon.requests import ChatRequest
from quantd.daemon.response_store import Item, ResponseStore, StoredResponse
from quantd.daemon.routes.content import events_of, json_of
from quantd.daemon.routes.keys import BACKGROUND, TIMING, responses_of, service_of
from quantd.daemon.routes.route import MODEL_REFUSALS, Route
from quantd.daemon.sections import collect_sections
from quantd.daemon.service import Service
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.responses import Reply, item_page
from quantd.daemon.wire.responses_input import input_items
from quantd.daemon.wire.responses_replies import (
    RESPONSE_EVENTS,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
)
from quantd.daemon.wire.responses_request import CountBody, ItemQuery, ResponsesBody, RetrieveQuery
from quantd.daemon.wire.responses_stream import ResponseStream
from quantd.daemon.wire.stream import send_parts, send_stream
from quantd.engine.errors import ContextLengthError, RequestError

# A comment, for streams whose events are numbered in advance.
PING = b": ping\n\n"

Keep = Callable[[dict[str, Any]], None]
"""Takes a response in a state that its client may come back to."""


async def create(request: web.Request, body: ResponsesBody) -> web.StreamResponse:
    """POST /v1/responses"""
    service, store, reply = service_of(request), responses_of(request), Reply(body)
    items, num_earlier = _conversation(body, reply.key, store)
    asked = body.neutral(items, num_earlier)

    def keep(response: dict[str, Any]) -> None:
        if body.stored:
            store.put(StoredResponse(response, items))

    frames = ResponseStream(reply, keep)
    if body.background:
        keep(reply.in_progress())
        told = Broadcast()
        request.app[BACKGROUND].start(reply.id, _answer_later(service, asked, frames, told, store), told)
        if body.streams:
            return await _follow(request, told, 0)
        return json_response(reply.in_progress())
    if body.streams:
        return await _stream(request, asked, frames)
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


async def _chat(service: Service, asked: ChatRequest) -> Generation:
    with _naming_input():
        return await service.chat(asked)


@contextlib.contextmanager
def _naming_input() -> Iterator[None]:
    """Errors of a conversation name the field that it comes in here."""
    try:
        yield
    except RequestError as error:
        if error.param == "messages":
            error.param = "input"
        raise


async def _answer(service: Service, asked: ChatRequest, reply: Reply, keep: Keep) -> dict[str, Any]:
    async with await _chat(service, asked) as generation:
        reply.started(generation.head)
        response = reply.finished(await collect_sections(generation), generation.usage)
    keep(response)
    return response


async def _answer_later(
    service: Service, asked: ChatRequest, frames: ResponseStream, told: Broadcast, store: ResponseStore
) -> None:
    """Answer to whoever listens, and at the end store what was told."""
    told.send(frames.begin())
    try:
        async with await _chat(service, asked) as generation:
            told.send(frames.start(generation.head))
            async for delta in generation:
                told.send(frames.delta(delta))
            told.send(frames.finish(generation.usage))
    # The boundary of a request whose client may be gone.
    except Exception as error:
        told.send(frames.error(error))
    # Room may have been made of it.
    with contextlib.suppress(ResponseNotFoundError):
        stored = store.get(frames.id)
        store.put(StoredResponse(stored.response, stored.input, told.frames))


async def _follow(request: web.Request, told: Broadcast, start: int) -> web.StreamResponse:
    """Stream what work in the background tells, from an event on."""
    timing = request.app[TIMING]
    parts = (part or PING async for part in told.read(start, timing.ping_seconds))
    return await send_parts(request, parts, ResponseStream.content_type)


async def _stream(request: web.Request, asked: ChatRequest, frames: ResponseStream) -> web.StreamResponse:
    try:
        return await send_stream(request, _chat(service_of(request), asked), frames, request.app[TIMING])
    except ContextLengthError as error:
        # Codex compacts a conversation that is too long for this event, and gives up for a status of 400.
        body = b"".join(frames.error(error))
        return web.Response(body=body, headers={"Content-Type": frames.content_type})


async def count_input_tokens(request: web.Request, body: CountBody) -> web.StreamResponse:
    """POST /v1/responses/input_tokens"""
    items, num_earlier = _conversation(body, "counted", responses_of(request))
    with _naming_input():
        prompt = await service_of(request).prompt(body.neutral(items, num_earlier))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def retrieve(request: web.Request, query: RetrieveQuery) -> web.StreamResponse:
    """GET /v1/responses/{id}: as it is, or of one in the background the stream, from an event on."""
    stored = _stored(request)
    if not query.stream:
        return json_response(stored.response)
    if not stored.response["background"]:
        raise RequestError("stream: only a response in the background can be streamed again", "stream")
    start = 0 if query.starting_after is None else query.starting_after + 1
    told = request.app[BACKGROUND].told(stored.response["id"])
    if told is None:
        body = b"".join(stored.frames[start:])
        return web.Response(body=body, headers={"Content-Type": ResponseStream.content_type})
    return await _follow(request, told, start)


async def cancel(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/{id}/cancel: of one in the background; one that is over stays as it is."""
    stored = _stored(request)
    response = stored.response
    if not response["background"]:
        raise RequestError(
            "only a response in the background can be cancelled; close the connection of others"
        )
    told = request.app[BACKGROUND].told(response["id"])
    if told is not None and await request.app[BACKGROUND].cancel(response["id"]):
        cancelled = StoredResponse(response | {"status": "cancelled"}, stored.input, told.frames)
        responses_of(request).put(cancelled)
    return json_response(_stored(request).response)


async def delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/responses/{id}: one in the background ends, too."""
    id = _stored(request).response["id"]
    await request.app[BACKGROUND].cancel(id)
    responses_of(request).delete(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def list_input_items(request: web.Request, query: ItemQuery) -> web.StreamResponse:
    """GET /v1/responses/{id}/input_items"""
    return json_response(item_page(_stored(request).input, query))


def _stored(request: web.Request) -> StoredResponse:
    return responses_of(request).get(request.match_info["id"])


_CREATED = json_of(ResponseObject), events_of(*RESPONSE_EVENTS)

RESPONSES_ROUTES: Sequence[Route] = (
    Route(
        "POST",
        "/responses",
        create,
        Scope.INFER,
        ResponsesBody,
        versioned=True,
        contents=_CREATED,
        refusals=MODEL_REFUSALS,
    ),
    Route(
        "POST",
        "/responses/input_tokens",
        count_input_tokens,
        Scope.INFER,
        CountBody,
        versioned=True,
        contents=[json_of(InputTokens)],
        refusals=MODEL_REFUSALS,
    ),
    Route(
        "GET",
        "/responses/{id}",
        retrieve,
        Scope.INFER,
        query=RetrieveQuery,
        versioned=True,
        contents=_CREATED,
    ),
    Route(
        "DELETE", "/responses/{id}", delete, Scope.INFER, versioned=True, contents=[json_of(DeletedResponse)]
    ),
    Route(
        "POST",
        "/responses/{id}/cancel",
        cancel,
        Scope.INFER,
        versioned=True,
        contents=[json_of(ResponseObject)],
    ),
    Route(
        "GET",
        "/responses/{id}/input_items",
        list_input_items,
        Scope.INFER,
        query=ItemQuery,
        versioned=True,
        contents=[json_of(ItemList)],
    ),
)
