"""Anthropic's replies, streams, models and errors (Anthropic API reference, version 2023-06-01)."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from quantd.daemon.deltas import Delta, Head, Usage
from quantd.daemon.models import StoredModel
from quantd.daemon.sections import Kind, Section, Sections
from quantd.daemon.wire.anthropic_replies import Error, ErrorObject
from quantd.daemon.wire.anthropic_request import PageQuery
from quantd.daemon.wire.errors import Fault, fault_of
from quantd.daemon.wire.stream import sse_comment, sse_frame
from quantd.engine.errors import RequestError

# Who sends it wants Anthropic's shapes, on paths that are OpenAI's too.
VERSION_HEADER = "anthropic-version"

# Some clients send back only thinking that is signed. Nothing is checked here, so any name will do.
_SIGNATURE = "quantd"

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class _BlockForm:
    """How a section is told: as a whole block with the text given, and by deltas to one with none.

    delta, field: the type of its deltas and where they have their text. closing: deltas after the last.
    """

    block: Callable[[Section, str], dict[str, Any]]
    delta: str
    field: str
    closing: Sequence[dict[str, Any]] = ()


def _text(section: Section, text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(section: Section, text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if text else ""}


def _tool_use(section: Section, text: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": _input(text)}


def _input(text: str) -> dict[str, Any]:
    """A call's arguments; none where max_tokens cut their text, which stop_reason tells."""
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


_BLOCKS: Mapping[Kind, _BlockForm] = {
    "content": _BlockForm(_text, "text_delta", "text"),
    "reasoning": _BlockForm(
        _thinking, "thinking_delta", "thinking", ({"type": "signature_delta", "signature": _SIGNATURE},)
    ),
    "tool_call": _BlockForm(_tool_use, "input_json_delta", "partial_json"),
}


def message_object(head: Head, sections: Sections, usage: Usage, caches: bool) -> dict[str, Any]:
    """A whole message. caches: see `usage_object`."""
    blocks = [_BLOCKS[section.kind].block(section, section.text) for section in sections.all]
    return _message(head, blocks, usage_object(usage, caches)) | _ending(sections)


def _message(head: Head, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _ending(sections: Sections) -> dict[str, Any]:
    if sections.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": sections.stop_string}
    return {"stop_reason": _STOP_REASONS[sections.finish_reason or "stop"], "stop_sequence": None}


def usage_object(usage: Usage, caches: bool) -> dict[str, int]:
    """Anthropic's usage, in which input_tokens are those not read from the cache.

    caches: whether the request asks for prompt caching; if not, all tokens count as input, as there.
    """
    cached = usage.cached_tokens if caches else 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


class MessageStream:
    """The events of one message; blocks never interleave. caches: see `usage_object`."""

    content_type: ClassVar[str] = "text/event-stream"

    def __init__(self, caches: bool) -> None:
        self._caches = caches
        self._sections = Sections()
        self._open: _BlockForm | None = None
        self._index = -1

    def ping(self, why: str) -> bytes:
        return (sse_comment(why) if why else b"") + _event("ping")

    def start(self, head: Head) -> Sequence[bytes]:
        usage = usage_object(Usage(head.prompt_tokens, 0, 0), self._caches)
        return [_event("message_start", message=_message(head, [], usage))]

    def delta(self, delta: Delta) -> Sequence[bytes]:
        frames: list[bytes] = []
        for section, part, begins, _ in self._sections.feed(delta):
            form = _BLOCKS[section.kind]
            if begins:
                frames += [*self._close(), self._begin(form, section)]
            if part:
                frames.append(self._delta({"type": form.delta, form.field: part}))
        return frames

    def finish(self, usage: Usage) -> Sequence[bytes]:
        counts = usage_object(usage, self._caches)
        ending = _event("message_delta", delta=_ending(self._sections), usage=counts)
        return [*self._close(), ending, _event("message_stop")]

    def error(self, error: Exception) -> Sequence[bytes]:
        return [_event("error", error=_error(fault_of(error)))]

    def _begin(self, form: _BlockForm, section: Section) -> bytes:
        self._open = form
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=form.block(section, ""))

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Sequence[bytes]:
        if self._open is None:
            return ()
        closing = [self._delta(delta) for delta in self._open.closing]
        self._open = None
        return [*closing, _event("content_block_stop", index=self._index)]


def _event(kind: str, **fields: object) -> bytes:
    return sse_frame({"type": kind} | fields, kind)


def error_object(fault: Fault) -> ErrorObject:
    """An error as a body."""
    return {"type": "error", "error": _error(fault), "request_id": fault.request_id}


def _error(fault: Fault) -> Error:
    unlisted = "invalid_request_error" if fault.status < 500 else "api_error"
    error: Error = {"type": _ERROR_TYPES.get(fault.status, unlisted), "message": _reason(fault)}
    if fault.code is not None:
        error["details"] = {"error_code": fault.code}
    return error


def _reason(fault: Fault) -> str:
    """What is wrong; of a prompt that is too long, in the words that make Claude Code compact it."""
    if fault.context is None:
        return fault.message
    prompt_len, limit = fault.context
    return f"prompt is too long: {prompt_len} tokens > {limit - 1} maximum ({fault.message})"


def model_object(stored: StoredModel, context_len: int | None) -> dict[str, Any]:
    """One entry of /v1/models."""
    moment = datetime.datetime.fromtimestamp(int(stored.created), datetime.UTC)
    return {
        "type": "model",
        "id": stored.name,
        "display_name": stored.name,
        "created_at": moment.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context_len,
        "max_tokens": context_len,
    }


def page_object(models: Sequence[dict[str, Any]], query: PageQuery) -> dict[str, Any]:
    """A page of models. Raises RequestError for a cursor that names none."""
    ids = [model["id"] for model in models]
    end = _place(ids, query.before_id, "before_id", len(ids))
    begin = _place(ids, query.after_id, "after_id", -1) + 1
    rest = range(begin, end)
    shown = rest[-query.limit :] if query.before_id else rest[: query.limit]
    return {
        "data": [models[i] for i in shown],
        "has_more": len(shown) < len(rest),
        "first_id": ids[shown[0]] if shown else None,
        "last_id": ids[shown[-1]] if shown else None,
    }


def _place(ids: Sequence[str], id: str | None, param: str, default: int) -> int:
    if id is None:
        return default
    if id not in ids:
        raise RequestError(f"{param}: no model {id!r} is here", param)
    return ids.index(id)
