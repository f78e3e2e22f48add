"""A route: method, path, handler, and the dialect that its errors are told in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from quantd.daemon.wire.errors import ErrorShape, openai_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """One entry of a surface's table. versioned: the path goes with and without /v1 before it.

    errors, statuses: how its dialect writes errors, and which statuses it has for others.
    """

    method: str
    path: str
    handler: Handler
    versioned: bool = False
    errors: ErrorShape = openai_error
    statuses: Mapping[int, int] = field(default_factory=dict)

    def paths(self) -> tuple[str, ...]:
        """All paths that lead here. Some clients put /v1 behind a base URL that ends in it already."""
        return (self.path, f"/v1{self.path}", f"/v1/v1{self.path}") if self.versioned else (self.path,)
