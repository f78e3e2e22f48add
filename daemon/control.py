"""What the command line asks of a daemon: health, status, load, unload, stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.models import ModelEntry, Models
from quantd.daemon.wire.errors import error_body, json_response
from quantd.daemon.wire.openai_request import parse
from quantd.engine.messages import Stats

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Control:
    """The daemon as a process: where it listens, since when, and the event that ends it."""

    models: Models
    version: str
    listening: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    stop: asyncio.Event = field(default_factory=asyncio.Event)


CONTROL = web.AppKey("control", Control)


class ModelBody(msgspec.Struct, frozen=True):
    """Which model; `options` are engine options for a new load."""

    model: str
    options: dict[str, Any] = {}


def control_routes() -> Sequence[tuple[str, str, Handler]]:
    """Method, path and handler of each."""
    return (
        ("GET", "/health", health),
        ("GET", "/quantd/status", status),
        ("POST", "/quantd/load", load),
        ("POST", "/quantd/unload", unload),
        ("POST", "/quantd/stop", stop),
    )


async def health(request: web.Request) -> web.StreamResponse:
    """GET /health: the daemon answers, whether or not a model is loaded."""
    return json_response({"status": "ok"})


async def status(request: web.Request) -> web.StreamResponse:
    """GET /quantd/status"""
    control = request.app[CONTROL]
    stats = await control.models.stats()
    return json_response(
        {
            "version": control.version,
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - control.started,
            "listening": control.listening,
            "models": [_model_status(entry, stats.get(entry.name)) for entry in control.models.entries],
        }
    )


def _model_status(entry: ModelEntry, stats: Stats | None) -> dict[str, Any]:
    done, total = entry.progress
    model = entry.model
    return {
        "name": entry.name,
        "state": entry.state,
        "progress": {"done": done, "total": total},
        "info": None if model is None else msgspec.structs.asdict(model.engine.info),
        "stats": None if stats is None else msgspec.structs.asdict(stats),
    }


async def load(request: web.Request) -> web.StreamResponse:
    """POST /quantd/load: a line of JSON for each step, the last one with the model's info or an error."""
    body = parse(await request.read(), ModelBody)
    entry = await request.app[CONTROL].models.open(body.model, body.options)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    async for done, total in entry.watch():
        await _line(response, {"status": "loading", "done": done, "total": total})
    try:
        model = await entry.loaded()
    # The boundary of a request once its status is out.
    except Exception as error:
        await _line(response, error_body(error)[1])
    else:
        await _line(response, {"status": "ready", "info": msgspec.structs.asdict(model.engine.info)})
    await response.write_eof()
    return response


async def _line(response: web.StreamResponse, message: dict[str, Any]) -> None:
    await response.write(msgspec.json.encode(message) + b"\n")


async def unload(request: web.Request) -> web.StreamResponse:
    """POST /quantd/unload: answers once the engine has ended."""
    body = parse(await request.read(), ModelBody)
    await request.app[CONTROL].models.unload(body.model)
    return json_response({"status": "unloaded", "model": body.model})


async def stop(request: web.Request) -> web.StreamResponse:
    """POST /quantd/stop: what runs may finish, then the daemon ends."""
    request.app[CONTROL].stop.set()
    return json_response({"status": "stopping"})
