"""What an answer may hold, for the description of a route: a media type and the types of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quantd.daemon.wire.lines import NDJSON

JSON = "application/json"
SSE = "text/event-stream"

Schema: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Content:
    """types: of what it holds, one of them; none: a text. framed: how that is put into the media type."""

    media_type: str
    types: Sequence[Any]
    framed: Callable[[Schema], Schema]
    """Makes a schema for what is sent of one for its JSON."""


def _as_it_is(schema: Schema) -> Schema:
    return schema


def _event(schema: Schema) -> Schema:
    """One server-sent event."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _event_or_done(schema: Schema) -> Schema:
    event = _event(schema)
    data = {"anyOf": [{"const": "[DONE]"}, event["properties"]["data"]]}
    return {**event, "properties": event["properties"] | {"data": data}}


def _lines(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def json_of(*types: Any) -> Content:
    """An object of one of these types."""
    return Content(JSON, types, _as_it_is)


def events_of(*types: Any) -> Content:
    """A stream of events, each of which has one of these."""
    return Content(SSE, types, _event)


def events_until_done(*types: Any) -> Content:
    """The same with OpenAI's last event, `[DONE]`."""
    return Content(SSE, types, _event_or_done)


def lines_of(*types: Any) -> Content:
    """Lines, each of which has one of these."""
    return Content(NDJSON, types, _lines)


TEXT = Content("text/plain", (), _as_it_is)
HTML = Content("text/html", (), _as_it_is)
