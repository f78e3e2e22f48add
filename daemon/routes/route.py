"""A route: method, path, what it reads and may answer, and the dialect that its errors are told in."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.routes.content import Content
from quantd.daemon.wire.body import read_body, read_query
from quantd.daemon.wire.errors import ErrorShape, openai_error

Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Takes a request, then its body and its query where the route has types for them."""

MODEL_REFUSALS = (400, 404, 429, 500, 503)
"""Statuses of what needs a model: bad, no such model, too many, and what keeps it from loading."""


@dataclass(frozen=True, eq=False)
class Route:
    """One entry of a surface's table.

    scope: what a client has to be allowed. body, query: what the handler is given of a request. versioned:
    the path goes with and without /v1 before it. errors, statuses: how its dialect writes errors, and which
    statuses it has for others. contents, successes: what an answer may hold that is no error, and its
    statuses. refusals: statuses of errors, beside those that follow from the above.
    """

    method: str
    path: str
    handler: Handler
    scope: Scope
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    versioned: bool = False
    errors: ErrorShape = openai_error
    statuses: Mapping[int, int] = field(default_factory=dict)
    contents: Sequence[Content] = ()
    successes: Sequence[int] = (200,)
    refusals: Sequence[int] = ()

    def paths(self) -> tuple[str, ...]:
        """All paths that lead here. Some clients put /v1 behind a base URL that ends in it already."""
        return (self.path, f"/v1{self.path}", f"/v1/v1{self.path}") if self.versioned else (self.path,)

    @property
    def name(self) -> str:
        """Method and path, as the documentation has them."""
        path = re.sub(r":[^{}]*(?=})", "", self.path)
        return f"{self.method} {'/v1' if self.versioned else ''}{path}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. Raises what makes it an error."""
        read: list[Any] = []
        if self.body is not None:
            read.append(await read_body(request, self.body))
        if self.query is not None:
            read.append(read_query(request, self.query))
        return await self.handler(request, *read)


def route_of(request: web.Request) -> Route | None:
    """The route that a request is for, if any."""
    route = getattr(request.match_info.handler, "__self__", None)
    return route if isinstance(route, Route) else None
