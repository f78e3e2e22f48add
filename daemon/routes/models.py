"""Which models there are: in OpenAI's form, and in Anthropic's for clients that speak it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.routes.keys import SERVICE
from quantd.daemon.routes.route import Route
from quantd.daemon.wire import anthropic, openai
from quantd.daemon.wire.anthropic_request import PageQuery
from quantd.daemon.wire.body import read_query
from quantd.daemon.wire.errors import json_response


async def list_models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models"""
    models = list(_models(request).values())
    if anthropic.VERSION_HEADER in request.headers:
        return json_response(anthropic.page_object(models, read_query(request, PageQuery)))
    return json_response({"object": "list", "data": models})


async def show_model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{id}, where the id may hold / and :"""
    name = request.match_info["id"].rstrip("/")
    models = _models(request)
    if name not in models:
        raise ModelNotFoundError(f"no model {name!r} is here; quantd list shows those that are")
    return json_response(models[name])


def _models(request: web.Request) -> dict[str, dict[str, Any]]:
    """All models by name, in the form that the request's dialect has for them."""
    models = request.app[SERVICE].models
    form = anthropic.model_object if anthropic.VERSION_HEADER in request.headers else openai.model_object
    loaded = {entry.name: entry.model for entry in models.entries}
    return {
        stored.name: form(stored.name, int(stored.created), loaded.get(stored.name))
        for stored in models.store.list()
    }


MODEL_ROUTES: Sequence[Route] = (
    Route("GET", "/models", list_models, versioned=True),
    Route("GET", "/models/{id:.+}", show_model, versioned=True),
)
