"""The prefixes on disk: what there is, and what is to go or to stay (`quantd cache`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.models import Models
from quantd.daemon.routes.content import json_of
from quantd.daemon.routes.keys import CONTROL, PREFIXES
from quantd.daemon.routes.route import Route
from quantd.daemon.wire.control_replies import Prefixes, RemovedPrefixes
from quantd.daemon.wire.errors import json_response
from quantd.engine.errors import EngineDiedError


class RemoveBody(msgspec.Struct, frozen=True):
    """Which prefixes go: by id, of a model, or all of them."""

    ids: list[str] = []
    model: str | None = None
    all: bool = False


class PinBody(msgspec.Struct, frozen=True):
    """Which prefixes stay; or with pinned false need not any more."""

    ids: list[str]
    pinned: bool = True


async def prefixes(request: web.Request) -> web.StreamResponse:
    """GET /quantd/cache: the prefixes on disk."""
    found = await asyncio.to_thread(request.app[PREFIXES].all)
    return json_response({"prefixes": found})


async def remove(request: web.Request, body: RemoveBody) -> web.StreamResponse:
    """POST /quantd/cache/rm: deletes prefixes with all that goes on from them, in memory too."""
    models = request.app[CONTROL].models
    if body.all:
        await _drop(models, None)
    removed = await asyncio.to_thread(request.app[PREFIXES].remove, body.ids, body.model, body.all)
    await _drop(models, removed.keys)
    return json_response({"prefixes": removed.prefixes, "bytes": removed.num_bytes})


async def pin(request: web.Request, body: PinBody) -> web.StreamResponse:
    """POST /quantd/cache/pin: keeps prefixes whatever else needs room."""
    pinned = await asyncio.to_thread(request.app[PREFIXES].pin, body.ids, body.pinned)
    return json_response({"prefixes": pinned})


async def _drop(models: Models, keys: Sequence[bytes] | None) -> None:
    """Let engines forget what is deleted: none writes it again from memory."""
    for entry in models.entries:
        if entry.model is not None and keys != []:
            with contextlib.suppress(EngineDiedError):
                await entry.model.engine.drop(keys)


PREFIX_ROUTES: Sequence[Route] = (
    Route("GET", "/quantd/cache", prefixes, Scope.ADMIN, contents=[json_of(Prefixes)]),
    Route(
        "POST",
        "/quantd/cache/rm",
        remove,
        Scope.ADMIN,
        RemoveBody,
        refusals=(404,),
        contents=[json_of(RemovedPrefixes)],
    ),
    Route(
        "POST", "/quantd/cache/pin", pin, Scope.ADMIN, PinBody, refusals=(404,), contents=[json_of(Prefixes)]
    ),
)
