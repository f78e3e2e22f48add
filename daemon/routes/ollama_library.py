"""Ollama's surface for models on disk: pull, create, copy, delete, blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.library import Library
from quantd.daemon.library_worker import Job, Pull
from quantd.daemon.routes.content import json_of, lines_of
from quantd.daemon.routes.keys import LIBRARY, TIMING
from quantd.daemon.routes.ollama import ollama_route
from quantd.daemon.routes.route import Route
from quantd.daemon.sources.spec import parse_source
from quantd.daemon.wire import ollama
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.incoming import read_pieces
from quantd.daemon.wire.lines import Lines, send_lines
from quantd.daemon.wire.ollama_library import CopyBody, CreateBody, NameBody, PullBody, progress_line
from quantd.daemon.wire.ollama_replies import ProgressLine


async def pull(request: web.Request, body: PullBody) -> web.StreamResponse:
    """POST /api/pull"""
    library = request.app[LIBRARY]
    return await _tell(request, _pulling(library, body.job(str(library.store.root))), body.stream)


async def _pulling(library: Library, job: Job) -> Lines:
    yield {"status": "pulling manifest"}
    assert isinstance(job.what, Pull)
    if not _is_here(library, job.what.spec):
        async for line in _adding(library, job):
            yield line
    yield {"status": "success"}


def _is_here(library: Library, spec: str) -> bool:
    """Whether a name that is nothing to fetch is that of a model here."""
    try:
        parse_source(spec)
    except ModelNotFoundError:
        try:
            library.store.get(spec)
        except ModelNotFoundError:
            return False
        return True
    return False


async def create(request: web.Request, body: CreateBody) -> web.StreamResponse:
    """POST /api/create"""
    library = request.app[LIBRARY]
    job = await asyncio.to_thread(body.job, str(library.store.root), library.blobs)
    return await _tell(request, _creating(library, job), body.stream)


async def _creating(library: Library, job: Job) -> Lines:
    async for line in _adding(library, job):
        yield line
    yield {"status": "success"}


async def _adding(library: Library, job: Job) -> Lines:
    async for step in library.add(job):
        yield progress_line(job, step)
    yield {"status": "writing manifest"}


async def _tell(request: web.Request, lines: Lines, stream: bool | None) -> web.StreamResponse:
    """The lines, or the last of them where the client wants no stream."""
    if stream is not False:
        return await send_lines(request, lines, ollama.error_object, request.app[TIMING].ping_seconds)
    last = [line async for line in lines][-1]
    return json_response(last)


async def copy(request: web.Request, body: CopyBody) -> web.StreamResponse:
    """POST /api/copy"""
    library = request.app[LIBRARY]
    async for _ in library.add(body.job(str(library.store.root))):
        pass
    return web.Response()


async def delete(request: web.Request, body: NameBody) -> web.StreamResponse:
    """DELETE /api/delete"""
    await request.app[LIBRARY].delete(body.chosen)
    return web.Response()


async def push(request: web.Request) -> web.StreamResponse:
    """POST /api/push"""
    return json_response({"error": "quantd has no registry to push models to"}, 501)


async def has_blob(request: web.Request) -> web.StreamResponse:
    """HEAD /api/blobs/{digest}"""
    path = request.app[LIBRARY].blobs.path(request.match_info["digest"])
    if not path.is_file():
        raise web.HTTPNotFound
    return web.Response()


async def receive_blob(request: web.Request) -> web.StreamResponse:
    """POST /api/blobs/{digest}: 201 once it is here, 200 where it was."""
    blobs, digest = request.app[LIBRARY].blobs, request.match_info["digest"]
    if blobs.path(digest).is_file():
        return web.Response()
    await blobs.receive(digest, read_pieces(request))
    return web.Response(status=201)


_ADD_REFUSALS = (400, 404, 500)
_PROGRESS = json_of(ProgressLine), lines_of(ProgressLine)

OLLAMA_LIBRARY_ROUTES: Sequence[Route] = (
    ollama_route("POST", "/api/pull", pull, Scope.ADMIN, *_PROGRESS, body=PullBody, refusals=_ADD_REFUSALS),
    ollama_route("POST", "/api/push", push, Scope.ADMIN, successes=(), refusals=(501,)),
    ollama_route(
        "POST", "/api/create", create, Scope.ADMIN, *_PROGRESS, body=CreateBody, refusals=_ADD_REFUSALS
    ),
    ollama_route("POST", "/api/copy", copy, Scope.ADMIN, body=CopyBody, refusals=_ADD_REFUSALS),
    ollama_route("DELETE", "/api/delete", delete, Scope.ADMIN, body=NameBody, refusals=(404,)),
    ollama_route("HEAD", "/api/blobs/{digest}", has_blob, Scope.ADMIN),
    ollama_route("POST", "/api/blobs/{digest}", receive_blob, Scope.ADMIN, successes=(200, 201)),
)
