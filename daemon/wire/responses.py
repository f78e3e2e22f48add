"""OpenAI's Responses: the object in each of its states (OpenAI API reference, responses)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from quantd.daemon.deltas import Head, Usage
from quantd.daemon.response_store import Item
from quantd.daemon.sections import Section, Sections
from quantd.daemon.wire.errors import Fault, fault_of
from quantd.daemon.wire.responses_output import Status, item_forms
from quantd.daemon.wire.responses_request import ItemQuery, ResponsesBody
from quantd.daemon.wire.responses_tools import call_names, echo_tools
from quantd.engine.errors import RequestError


class Reply:
    """The answer to one request, in whatever state it is. key: what its id and those of its items share."""

    def __init__(self, body: ResponsesBody) -> None:
        self.key = uuid.uuid4().hex
        self.id = f"resp_{self.key}"
        self.forms = item_forms(body.summarizes, call_names(body.tools or ()))
        self._fields = {"id": self.id, "object": "response", "created_at": int(time.time())} | _echo(body)
        self._model = body.model or "default"

    def started(self, head: Head) -> None:
        """Note which model answers."""
        self._model = head.model

    def item_id(self, index: int, section: Section) -> str:
        """The id of the output item at a place."""
        return f"{self.forms[section.kind].prefix}_{self.key}_{index}"

    def item(self, index: int, section: Section, content: str | None, status: Status) -> Item:
        """The output item at a place, with so much of its content."""
        item = self.forms[section.kind].item(section, content)
        return {"id": self.item_id(index, section), "status": status} | item

    def output(self, sections: Sections, last: Status) -> list[Item]:
        """All items. last: what has become of the last one."""
        end = len(sections.all) - 1
        return [
            self.item(i, section, section.text, last if i == end else "completed")
            for i, section in enumerate(sections.all)
        ]

    def in_progress(self) -> dict[str, Any]:
        """The response before its answer is known."""
        return self._state("in_progress", [])

    def finished(self, sections: Sections, usage: Usage) -> dict[str, Any]:
        """The response with its whole answer."""
        status = final_status(sections)
        was_cut = status == "incomplete"
        return self._state(status, self.output(sections, status)) | {
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "completed_at": None if was_cut else int(time.time()),
            "usage": usage_object(usage),
        }

    def failed(self, error: Exception, sections: Sections) -> dict[str, Any]:
        """The response that an error ended, after so much of an answer."""
        output = self.output(sections, "incomplete")
        return self._state("failed", output) | {"error": error_object(fault_of(error))}

    def _state(self, status: str, output: Sequence[Item]) -> dict[str, Any]:
        return self._fields | {"model": self._model, "status": status, "output": output}


def final_status(sections: Sections) -> Status:
    """What has become of an answer that is over, and of its last item."""
    return "incomplete" if sections.finish_reason == "length" else "completed"


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request, and what has a value only in some states."""
    sent = msgspec.to_builtins(body)
    text_format = (sent["text"] or {}).get("format")
    return {
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": sent["reasoning"] or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.stored,
        "temperature": body.temperature,
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": sent["tool_choice"] or "auto",
        "top_logprobs": body.top_logprobs or 0,
        "tools": echo_tools(body.tools or ()),
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, under the names it has here."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_object(fault: Fault) -> dict[str, str]:
    """The error of a response that failed."""
    return {"code": _code(fault), "message": fault.message}


def _code(fault: Fault) -> str:
    """Codex compacts, waits or gives up by these."""
    if fault.context is not None:
        return "context_length_exceeded"
    if fault.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if fault.status < 500 else "server_error"


def item_page(items: Sequence[Item], query: ItemQuery) -> dict[str, Any]:
    """A page of a response's input. Raises RequestError for a cursor that names no item."""
    ordered = items if query.order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if query.after is not None and query.after not in ids:
        raise RequestError(f"after: no item {query.after!r} is here", "after")
    begin = 0 if query.after is None else ids.index(query.after) + 1
    page = ordered[begin : begin + query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + query.limit < len(ids),
    }
