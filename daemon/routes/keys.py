"""What handlers find in the app."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from quantd.daemon.background import Background
from quantd.daemon.control import Control
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
RESPONSES = web.AppKey("responses", ResponseStore)
BACKGROUND = web.AppKey("background", Background)
SLOTS = web.AppKey("slots", Slots)
TABLE = web.AppKey[Sequence[Route]]("table")
TIMING = web.AppKey("timing", Timing)
