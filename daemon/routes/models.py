"""Which models there are: in OpenAI's form, and in Anthropic's for clients that speak it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.model_card import ModelCard
from quantd.daemon.routes.content import json_of
from quantd.daemon.routes.keys import CARDS, service_of
from quantd.daemon.routes.route import Route
from quantd.daemon.store import plain_name
from quantd.daemon.wire import anthropic, openai
from quantd.daemon.wire.anthropic_replies import ListedModel, ModelPage
from quantd.daemon.wire.anthropic_request import PageQuery
from quantd.daemon.wire.body import read_query
from quantd.daemon.wire.errors import json_response
from quantd.daemon.wire.openai_replies import ModelList, ModelObject


async def list_models(request: web.Request) -> web.StreamResponse:
    """GET /v1/models"""
    models = list((await _models(request)).values())
    if anthropic.VERSION_HEADER in request.headers:
        return json_response(anthropic.page_object(models, read_query(request, PageQuery)))
    return json_response({"object": "list", "data": models})


async def show_model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{id}, where the id may hold / and :"""
    name = request.match_info["id"].rstrip("/")
    models = await _models(request)
    if plain_name(name) not in models:
        raise ModelNotFoundError(f"no model {name!r} is here; quantd list shows those that are")
    return json_response(models[plain_name(name)])


async def _models(request: web.Request) -> dict[str, dict[str, Any]]:
    """All models by name, in the form that the request's dialect has for them."""
    cards = request.app[CARDS]
    loaded = {entry.name: entry.model for entry in service_of(request).models.entries}

    def told(card: ModelCard) -> dict[str, Any]:
        stored, context_len = card.stored, cards.context_len(card)
        if anthropic.VERSION_HEADER in request.headers:
            return anthropic.model_object(stored, context_len)
        return openai.model_object(stored, context_len, loaded.get(stored.name))

    return {card.stored.name: told(card) for card in await cards.all()}


MODEL_ROUTES: Sequence[Route] = (
    Route(
        "GET", "/models", list_models, Scope.INFER, versioned=True, contents=[json_of(ModelList, ModelPage)]
    ),
    Route(
        "GET",
        "/models/{id:.+}",
        show_model,
        Scope.INFER,
        versioned=True,
        contents=[json_of(ModelObject, ListedModel)],
    ),
)
