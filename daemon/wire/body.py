"""What the parsing of every dialect's bodies shares: strict types, bounds, sampling, tool arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from quantd.daemon.wire.encodings import read_data
from quantd.engine.errors import RequestError
from quantd.engine.request import SamplingParams

MAX_STOPS = 16
MAX_STOP_LEN = 4096
# Answers to one request: copies of one, or prompts.
MAX_CHOICES = 128

# What a client may leave to the model's own defaults.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
)

Body = TypeVar("Body")


async def read_body(request: web.Request, body: type[Body]) -> Body:
    """The body of a request, decompressed and parsed. Raises as `read_data` and `parse`."""
    return parse(await read_data(request), body)


def read_query(request: web.Request, query: type[Body]) -> Body:
    """The query of a request's URL as this type. Raises RequestError."""
    try:
        return msgspec.convert(dict(request.query), query, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"invalid query: {error}", _param(str(error))) from None


def parse(data: bytes, body: type[Body]) -> Body:
    """JSON of this type. Raises RequestError naming the field at fault."""
    try:
        return msgspec.json.decode(data, type=body)
    except msgspec.ValidationError as error:
        raise RequestError(f"invalid request: {error}", _param(str(error))) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _param(message: str) -> str | None:
    """The field that a msgspec error is about, as in `messages[0].content`."""
    match = re.search(r"`\$\.([^`]*)`", message) or re.search(r"required field `(\w+)`", message)
    return match[1] if match else None


def refuse_unsupported(body: msgspec.Struct, names: tuple[str, ...]) -> None:
    """Raise RequestError for the first of these fields that is given."""
    for name in names:
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is not supported yet", name)


def check_range(name: str, value: int, high: int) -> int:
    """The value. Raises RequestError for a field outside 0..high."""
    if not 0 <= value <= high:
        raise RequestError(f"{name} must be between 0 and {high}, got {value}", name)
    return value


def stop_strings(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """The stop strings of the field `name`; empty ones are none. Raises RequestError."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{name} must hold at most {MAX_STOPS} strings, got {len(stops)}", name)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_LEN:
        raise RequestError(
            f"{name}: a string may have {MAX_STOP_LEN} characters at most, got {longest}", name
        )
    return tuple(text for text in stops if text)


def sampling(given: Mapping[str, Any], **fixed: Any) -> tuple[SamplingParams, frozenset[str]]:
    """The parameters, and which of SAMPLING_FIELDS are open: not in `given`, or None there.

    fixed: the other fields of the parameters.
    """
    known = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**known, **fixed), frozenset(SAMPLING_FIELDS) - known.keys()


def read_arguments(arguments: str | dict[str, Any] | None) -> Any:
    """A call's arguments as templates read them. They print JSON themselves, so JSON text is read first."""
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(arguments or "{}")
    return arguments or {}


def texts_or_ids(value: str | list[Any], name: str) -> list[str | list[int]]:
    """The field `name`: a text, token ids, or a list of either kind. Raises RequestError.

    Nothing is mixed, and true and 1.5 are no ids.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise RequestError(f"{name} must not be an empty list", name)
    if all(type(item) is int for item in value):
        return [value]
    texts = all(isinstance(item, str) for item in value)
    if texts or all(_is_id_list(item) for item in value):
        return value
    raise RequestError(f"{name} must be a string, token ids, or a list of only one of the two", name)


def _is_id_list(item: object) -> bool:
    return isinstance(item, list) and all(type(token_id) is int for token_id in item)


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any], strict: bool | None
) -> dict[str, Any]:
    """A tool in OpenAI's form for chats, its keys in one order, whatever the client's."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def thinks(effort: str | None) -> bool | None:
    """Whether an effort, in OpenAI's words, asks for reasoning; how much is up to templates that read it."""
    return None if effort is None else effort not in ("none", "minimal")
