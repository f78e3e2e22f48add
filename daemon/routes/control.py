"""What the command line asks of a daemon: version, status, load, unload, stop; and its metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.loaded_model import ModelEntry
from quantd.daemon.models import Models
from quantd.daemon.routes.content import TEXT, json_of, lines_of
from quantd.daemon.routes.keys import CONTROL, service_of
from quantd.daemon.routes.route import MODEL_REFUSALS, Route
from quantd.daemon.status import memory_status, model_status, request_statuses
from quantd.daemon.waits import reasons, waits_of
from quantd.daemon.wire.control_replies import (
    Asleep,
    Awake,
    Cancelled,
    LoadLine,
    Status,
    Stopping,
    Unloaded,
    Version,
)
from quantd.daemon.wire.errors import fault_of, json_response, openai_error
from quantd.engine.messages import Stats


class ModelBody(msgspec.Struct, frozen=True):
    """Which model; `options` are engine options for a new load. pin: whether it stays for ever now."""

    model: str
    options: dict[str, Any] = {}
    pin: bool | None = None


class CancelBody(msgspec.Struct, frozen=True):
    """Which request."""

    id: str


async def version(request: web.Request) -> web.StreamResponse:
    """GET /quantd/version: a daemon answers, whatever it is doing."""
    return json_response({"version": request.app[CONTROL].version})


async def status(request: web.Request) -> web.StreamResponse:
    """GET /quantd/status"""
    control = request.app[CONTROL]
    stats = await control.models.stats(detail=True)
    whys = reasons(control.models.entries, stats)
    return json_response(
        {
            "version": control.version,
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - control.started,
            "listening": control.listening,
            "log": control.log,
            "request_log": None if control.request_log is None else str(control.request_log),
            "memory": memory_status(),
            "models": [_model_status(control.models, entry, stats) for entry in control.models.entries],
            "requests": request_statuses(service_of(request).activity.requests, stats, whys),
            "stopped": control.models.deaths.stopped,
            "allowance": msgspec.to_builtins(control.models.allowance(stats)),
        }
    )


def _model_status(models: Models, entry: ModelEntry, stats: Mapping[str, Stats]) -> dict[str, Any]:
    known = stats.get(entry.name)
    waiting = msgspec.to_builtins(waits_of(entry, known))
    return model_status(entry, known) | {"pinned": models.is_pinned(entry.name), "waiting": waiting}


async def load(request: web.Request, body: ModelBody) -> web.StreamResponse:
    """POST /quantd/load: a line of JSON for each step, the last one with the model's info or an error."""
    entry = await request.app[CONTROL].models.load(body.model, body.options, body.pin)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    async for done, total in entry.watch():
        await _line(response, {"status": "loading", "done": done, "total": total, "why": entry.note})
    try:
        model = await entry.loaded()
    # The boundary of a request once its status is out.
    except Exception as error:
        await _line(response, openai_error(fault_of(error)))
    else:
        await _line(response, {"status": "ready", "info": msgspec.structs.asdict(model.engine.info)})
    await response.write_eof()
    return response


async def _line(response: web.StreamResponse, message: Mapping[str, Any]) -> None:
    await response.write(msgspec.json.encode(message) + b"\n")


async def unload(request: web.Request, body: ModelBody) -> web.StreamResponse:
    """POST /quantd/unload: answers once the engine has ended."""
    await request.app[CONTROL].models.unload(body.model)
    return json_response({"status": "unloaded", "model": body.model})


async def sleep(request: web.Request) -> web.StreamResponse:
    """POST /quantd/sleep: no GPU is held when it answers, nor until /quantd/wake."""
    return json_response({"unloaded": await request.app[CONTROL].models.suspend()})


async def wake(request: web.Request) -> web.StreamResponse:
    """POST /quantd/wake: models may be loaded again."""
    request.app[CONTROL].models.resume()
    return json_response({"status": "awake"})


async def cancel(request: web.Request, body: CancelBody) -> web.StreamResponse:
    """POST /quantd/cancel: end a request of any client's, by the id that the status has for it."""
    service_of(request).activity.cancel(body.id)
    return json_response({"status": "cancelled", "id": body.id})


async def stop(request: web.Request) -> web.StreamResponse:
    """POST /quantd/stop: what runs may finish, then the daemon ends."""
    request.app[CONTROL].stop.set()
    return json_response({"status": "stopping"})


async def metrics(request: web.Request) -> web.StreamResponse:
    """GET /metrics"""
    service = service_of(request)
    engines = await service.models.stats()
    page = service.metrics.render(engines, service.models.totals.counts())
    return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


CONTROL_ROUTES: Sequence[Route] = (
    Route("GET", "/metrics", metrics, Scope.INFER, contents=[TEXT]),
    Route("GET", "/quantd/version", version, Scope.INFER, contents=[json_of(Version)]),
    Route("GET", "/quantd/status", status, Scope.INFER, contents=[json_of(Status)]),
    Route(
        "POST",
        "/quantd/load",
        load,
        Scope.ADMIN,
        ModelBody,
        contents=[lines_of(LoadLine)],
        refusals=MODEL_REFUSALS,
    ),
    Route(
        "POST",
        "/quantd/unload",
        unload,
        Scope.ADMIN,
        ModelBody,
        refusals=(404,),
        contents=[json_of(Unloaded)],
    ),
    Route(
        "POST",
        "/quantd/cancel",
        cancel,
        Scope.ADMIN,
        CancelBody,
        refusals=(404,),
        contents=[json_of(Cancelled)],
    ),
    Route("POST", "/quantd/sleep", sleep, Scope.ADMIN, contents=[json_of(Asleep)]),
    Route("POST", "/quantd/wake", wake, Scope.ADMIN, contents=[json_of(Awake)]),
    Route("POST", "/quantd/stop", stop, Scope.ADMIN, contents=[json_of(Stopping)]),
)
