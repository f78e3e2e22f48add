"""llama-server's slots: what they are here, and how their prompts are saved, restored and erased."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.answers import collect
from quantd.daemon.requests import CompletionRequest, Options
from quantd.daemon.routes.content import json_of
from quantd.daemon.routes.keys import service_of, slots_of
from quantd.daemon.routes.route import MODEL_REFUSALS, Route
from quantd.daemon.wire import llama_server
from quantd.daemon.wire.errors import Fault, json_response
from quantd.daemon.wire.llama_server_replies import Slot, SlotAction
from quantd.daemon.wire.llama_server_request import SlotBody, SlotQuery, SlotsQuery
from quantd.engine.errors import RequestError
from quantd.engine.request import SamplingParams


async def list_slots(request: web.Request, query: SlotsQuery) -> web.StreamResponse:
    """GET /slots: as many as requests may run at a time. With ?fail_on_no_slot=1, 503 if all are taken."""
    models = service_of(request).models
    async with service_of(request).model(query.model) as model:
        num_slots = models.entry(model.name).config.max_num_requests
        stats = await model.engine.stats()
        num_busy = stats.num_running + stats.num_waiting
        if query.fail_on_no_slot and num_busy >= num_slots:
            return json_response(llama_server.llama_error(Fault(503, "no slot available")), 503)
        slots = [llama_server.slot_object(slot, slot < num_busy, model) for slot in range(num_slots)]
        return json_response(slots)


async def act_on_slot(request: web.Request, body: SlotBody, query: SlotQuery) -> web.StreamResponse:
    """POST /slots/{id}?action=save, restore or erase"""
    return json_response(await _ACTIONS[query.action](request, body, int(request.match_info["slot"])))


async def _save(request: web.Request, body: SlotBody, slot: int) -> dict[str, Any]:
    started = time.perf_counter()
    async with service_of(request).model(body.model) as model:
        file = await asyncio.to_thread(slots_of(request).save, model.name, slot, body.filename)
    milliseconds = 1000 * (time.perf_counter() - started)
    return {
        "id_slot": slot,
        "filename": body.filename,
        "n_saved": len(file.prompt.tokens),
        "n_written": file.size,
        "timings": {"save_ms": milliseconds},
    }


async def _restore(request: web.Request, body: SlotBody, slot: int) -> dict[str, Any]:
    """Have the saved prompt computed, unless the prefix cache holds it still; then answer."""
    started = time.perf_counter()
    file = await asyncio.to_thread(slots_of(request).load, body.filename)
    name, tokens = file.prompt.model, file.prompt.tokens
    if body.model not in (None, name):
        raise RequestError(
            f"filename: {body.filename} is a prompt of {name}, not of {body.model}", "filename"
        )
    options = Options(sampling=SamplingParams(max_tokens=0))
    asked = CompletionRequest(model=name, prompts=[tokens], options=options)
    async with await service_of(request).complete(asked) as generation:
        await collect(generation)
    slots_of(request).note(name, slot, tokens)
    milliseconds = 1000 * (time.perf_counter() - started)
    return {
        "id_slot": slot,
        "filename": body.filename,
        "n_restored": len(tokens),
        "n_read": file.size,
        "timings": {"restore_ms": milliseconds},
    }


async def _erase(request: web.Request, body: SlotBody, slot: int) -> dict[str, Any]:
    """Forget the prompt, in the prefix cache too."""
    async with service_of(request).model(body.model) as model:
        tokens = slots_of(request).erase(model.name, slot)
        service_of(request).forget(model, tokens)
        return {"id_slot": slot, "n_erased": len(tokens)}


_ACTIONS: Mapping[str, Callable[[web.Request, SlotBody, int], Awaitable[dict[str, Any]]]] = {
    "save": _save,
    "restore": _restore,
    "erase": _erase,
}

SLOT_ROUTES: Sequence[Route] = (
    Route(
        "GET",
        "/slots",
        list_slots,
        Scope.INFER,
        query=SlotsQuery,
        contents=[json_of(list[Slot])],
        errors=llama_server.llama_error,
        refusals=MODEL_REFUSALS,
    ),
    Route(
        "POST",
        r"/slots/{slot:\d{1,4}}",
        act_on_slot,
        Scope.INFER,
        SlotBody,
        SlotQuery,
        contents=[json_of(SlotAction)],
        errors=llama_server.llama_error,
        refusals=MODEL_REFUSALS,
    ),
)
