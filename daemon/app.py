"""The daemon's HTTP application: every surface's table of routes over one service."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from quantd.daemon.access.per_client import PerClient
from quantd.daemon.access.policy import Access
from quantd.daemon.admission import Admission
from quantd.daemon.background import Background
from quantd.daemon.control import Control
from quantd.daemon.guard import ACCESS, UNDER_WAY, guard, tell_origin
from quantd.daemon.library import Library
from quantd.daemon.limits import DEFAULT_LIMITS, Limits
from quantd.daemon.model_card import Cards
from quantd.daemon.response_store import ResponseStore
from quantd.daemon.routes.anthropic import ANTHROPIC_ROUTES
from quantd.daemon.routes.api_keys import API_KEY_ROUTES
from quantd.daemon.routes.control import CONTROL_ROUTES
from quantd.daemon.routes.keys import (
    BACKGROUND,
    CARDS,
    CONTROL,
    LIBRARY,
    PREFIXES,
    RESPONSES,
    SERVICE,
    SLOTS,
    TABLE,
    TIMING,
)
from quantd.daemon.routes.llama_server import LLAMA_SERVER_ROUTES
from quantd.daemon.routes.models import MODEL_ROUTES
from quantd.daemon.routes.ollama import OLLAMA_ROUTES
from quantd.daemon.routes.ollama_library import OLLAMA_LIBRARY_ROUTES
from quantd.daemon.routes.openai import OPENAI_ROUTES
from quantd.daemon.routes.openapi import OPENAPI_ROUTES
from quantd.daemon.routes.page import PAGE_ROUTES
from quantd.daemon.routes.prefixes import PREFIX_ROUTES
from quantd.daemon.routes.responses import RESPONSES_ROUTES
from quantd.daemon.routes.route import Route, route_of
from quantd.daemon.service import Service
from quantd.daemon.slots import Slots
from quantd.daemon.stored_prefixes import StoredPrefixes
from quantd.daemon.tracking import name_answer, track_requests
from quantd.daemon.wire import anthropic
from quantd.daemon.wire.errors import (
    ERROR_SHAPE,
    ERROR_STATUS,
    ErrorShape,
    answer_errors,
    openai_error,
)
from quantd.daemon.wire.incoming import LIMITS
from quantd.daemon.wire.stream import DEFAULT_TIMING, Timing

ROUTES = (
    *CONTROL_ROUTES,
    *PREFIX_ROUTES,
    *API_KEY_ROUTES,
    *MODEL_ROUTES,
    *OPENAI_ROUTES,
    *ANTHROPIC_ROUTES,
    *RESPONSES_ROUTES,
    *OLLAMA_ROUTES,
    *OLLAMA_LIBRARY_ROUTES,
    *LLAMA_SERVER_ROUTES,
    *OPENAPI_ROUTES,
    *PAGE_ROUTES,
)


def make_app(
    service: Service,
    control: Control,
    access: Access,
    timing: Timing = DEFAULT_TIMING,
    limits: Limits = DEFAULT_LIMITS,
) -> web.Application:
    """The whole surface over one service. Paths work with a slash at the end too."""
    middlewares = [_count, track_requests, answer_errors, guard]
    app = web.Application(middlewares=middlewares, client_max_size=limits.max_body)
    app[ACCESS] = access
    app[UNDER_WAY] = Admission(limits.max_connections, limits.max_client_queue)
    app[SERVICE] = service
    app[CONTROL] = control
    app[CARDS] = Cards(service.models)
    app[SLOTS] = PerClient(lambda client: Slots(control.state / "slots" / client.file_name))
    app[PREFIXES] = StoredPrefixes(control.prefixes)
    app[LIBRARY] = Library(service.models, app[PREFIXES])
    app[TABLE] = ROUTES
    app[TIMING] = timing
    app[LIMITS] = limits
    app[ERROR_SHAPE] = error_shape
    app[ERROR_STATUS] = error_status
    app[RESPONSES] = PerClient(lambda client: ResponseStore())
    app[BACKGROUND] = Background()
    app.on_cleanup.append(_end_background)
    app.on_response_prepare.append(name_answer)
    app.on_response_prepare.append(tell_origin)
    for route in ROUTES:
        _add_route(app, route)
    return app


@web.middleware
async def _count(request: web.Request, handler: Any) -> web.StreamResponse:
    """Know how many requests are being answered."""
    control = request.app[CONTROL]
    control.num_requests += 1
    try:
        response: web.StreamResponse = await handler(request)
        return response
    finally:
        control.num_requests -= 1


async def _end_background(app: web.Application) -> None:
    await app[BACKGROUND].close()


def make_runner(app: web.Application) -> web.AppRunner:
    """What runs the app. A handler is cancelled when its client leaves."""
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)


def error_shape(request: web.Request) -> ErrorShape:
    """The shape of the handler's dialect, or of those whose paths begin so; else OpenAI's."""
    if anthropic.VERSION_HEADER in request.headers:
        return anthropic.error_object
    route = route_of(request)
    return _SHAPES.get(_first_part(request.path), openai_error) if route is None else route.errors


def _first_part(path: str) -> str:
    """What a path begins with, but for /v1."""
    return next((part for part in path.split("/") if part not in ("", "v1")), "")


_SHAPES = {_first_part(route.path): route.errors for route in ROUTES}


def error_status(request: web.Request, status: int) -> int:
    """The status that the handler's dialect has for this one."""
    route = route_of(request)
    return status if route is None else route.statuses.get(status, status)


def _add_route(app: web.Application, route: Route) -> None:
    """With GET comes HEAD, which monitors ask with (RFC 9110, section 9.1)."""
    for path in route.paths():
        if route.method == "GET":
            app.router.add_get(path + "{_:/?}", route.handle, allow_head=True)
        else:
            app.router.add_route(route.method, path + "{_:/?}", route.handle)
