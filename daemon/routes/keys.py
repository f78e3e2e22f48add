"""What handlers find in the app."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from quantd.daemon.access.per_client import PerClient
from quantd.daemon.background import Background
from quantd.daemon.control import Control
from quantd.daemon.guard import client_of
from quantd.daemon.library import Library
from quantd.daemon.model_card import Cards
from quantd.daemon.response_store import ResponseStore
from quantd.daemon.routes.route import Route
from quantd.daemon.service import Service
from quantd.daemon.slots import Slots
from quantd.daemon.stored_prefixes import StoredPrefixes
from quantd.daemon.wire.stream import Timing

CARDS = web.AppKey("cards", Cards)
LIBRARY = web.AppKey("library", Library)
PREFIXES = web.AppKey("prefixes", StoredPrefixes)
SERVICE = web.AppKey("service", Service)
CONTROL = web.AppKey("control", Control)
RESPONSES = web.AppKey[PerClient[ResponseStore]]("responses")
BACKGROUND = web.AppKey("background", Background)
SLOTS = web.AppKey[PerClient[Slots]]("slots")
TABLE = web.AppKey[Sequence[Route]]("table")
TIMING = web.AppKey("timing", Timing)


def service_of(request: web.Request) -> Service:
    """The service, for whoever asks."""
    return request.app[SERVICE].of(client_of(request))


def responses_of(request: web.Request) -> ResponseStore:
    """The stored responses of whoever asks."""
    return request.app[RESPONSES].of(client_of(request))


def slots_of(request: web.Request) -> Slots:
    """The slots of whoever asks."""
    return request.app[SLOTS].of(client_of(request))
