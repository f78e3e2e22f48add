"""API keys, as `quantd key` asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from aiohttp import web

from quantd.daemon.access.keys import KeyFile, KeyScope
from quantd.daemon.access.scope import Scope
from quantd.daemon.guard import ACCESS
from quantd.daemon.routes.content import json_of
from quantd.daemon.routes.route import Route
from quantd.daemon.wire.errors import json_response


class KeyBody(msgspec.Struct, frozen=True):
    """A key to make."""

    name: str
    scope: KeyScope = "infer"


class ListedKey(msgspec.Struct, frozen=True):
    """A key, of which the text itself is kept nowhere. created: seconds since 1970."""

    name: str
    scope: KeyScope
    created: float


class KeyList(msgspec.Struct, frozen=True):
    """All keys, and the file with their hashes."""

    file: str
    keys: list[ListedKey]


class AddedKey(msgspec.Struct, frozen=True):
    """A new key, told this once, and the file with its hash."""

    file: str
    name: str
    scope: KeyScope
    key: str


class RemovedKey(msgspec.Struct, frozen=True):
    """The name of a key that counts for nothing any more."""

    name: str


async def list_keys(request: web.Request) -> web.StreamResponse:
    """GET /quantd/keys"""
    file = _file(request)
    keys = [ListedKey(key.name, key.scope, key.created) for key in file.all()]
    return json_response(KeyList(str(file.path), keys))


async def add_key(request: web.Request, body: KeyBody) -> web.StreamResponse:
    """POST /quantd/keys: make one."""
    file = _file(request)
    text = await asyncio.to_thread(file.add, body.name, body.scope)
    return json_response(AddedKey(str(file.path), body.name, body.scope, text))


async def remove_key(request: web.Request) -> web.StreamResponse:
    """DELETE /quantd/keys/{name}"""
    name = request.match_info["name"]
    await asyncio.to_thread(_file(request).remove, name)
    return json_response(RemovedKey(name))


def _file(request: web.Request) -> KeyFile:
    return request.app[ACCESS].keys


API_KEY_ROUTES: Sequence[Route] = (
    Route("GET", "/quantd/keys", list_keys, Scope.ADMIN, contents=[json_of(KeyList)], refusals=(500,)),
    Route(
        "POST", "/quantd/keys", add_key, Scope.ADMIN, KeyBody, contents=[json_of(AddedKey)], refusals=(500,)
    ),
    Route(
        "DELETE",
        "/quantd/keys/{name}",
        remove_key,
        Scope.ADMIN,
        contents=[json_of(RemovedKey)],
        refusals=(500,),
    ),
)
