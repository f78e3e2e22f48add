"""Ollama's replies, streams and errors for generate and chat (ollama/ollama, api/types.go, docs/api.md).

A stream is a JSON object a line; content is always there, even empty, which some clients insist on. A call
of a tool goes out whole, as its arguments are an object: each in a line of its own but for the last, which
is in the last line, since some clients tell by that line whether there was any.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from quantd.daemon.answers import Answer
from quantd.daemon.deltas import Delta, Head, ScoredToken, Usage
from quantd.daemon.sections import Section, Sections
from quantd.daemon.wire.errors import Fault, fault_of
from quantd.daemon.wire.lines import NDJSON, json_line
from quantd.daemon.wire.ollama_replies import ErrorLine

# JSON has no infinity.
_MIN_LOGPROB = -9999.0


def error_object(fault: Fault) -> ErrorLine:
    """Ollama's shape: the reason, for people."""
    return {"error": fault.message}


def utc_time(seconds: float) -> str:
    """RFC 3339 with six digits of fractions, more of which Python's parser refuses."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def local_time(seconds: float) -> str:
    """The same in the local zone, with its offset, as Ollama tells the times of models."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="microseconds")


def done_object(model: str, piece: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The reply to a request that only had a model loaded or unloaded."""
    return _object(model, piece) | {"done": True, "done_reason": reason}


def _object(model: str, piece: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "created_at": utc_time(time.time()), **piece}


def _ending(reason: str | None, usage: Usage) -> dict[str, Any]:
    """What ends an answer. Calls of tools end it as any other stop does. Durations in ns, and never 0."""
    load, prompt, decode = usage.load_seconds, usage.prompt_seconds, usage.decode_seconds
    return {
        "done": True,
        "done_reason": "stop" if reason == "tool_calls" else reason,
        "total_duration": nanoseconds(load + prompt + decode),
        "load_duration": nanoseconds(load),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(prompt),
        "cached_prompt_tokens": usage.cached_tokens,
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(decode),
    }


def nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by durations."""
    return max(round(seconds * 1e9), 1)


class Piece(Protocol):
    """Writes what a line or a reply of one endpoint says."""

    def __call__(
        self, text: str = "", thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]: ...


def chat_piece(text: str = "", thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Of /api/chat."""
    return {"message": {"role": "assistant", "content": text, **_extras(thinking, calls)}}


def generate_piece(
    text: str = "", thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Of /api/generate."""
    return {"response": text, **_extras(thinking, calls)}


def _extras(thinking: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return ({"thinking": thinking} if thinking else {}) | ({"tool_calls": list(calls)} if calls else {})


@dataclass(frozen=True)
class Telling:
    """How an answer is told. model: as the request names it. scored: with log probabilities.

    continues: with the tokens that a later request may go on from.
    """

    piece: Piece
    model: str
    scored: bool = False
    continues: bool = False


def reply(telling: Telling, head: Head, answer: Answer, usage: Usage) -> dict[str, Any]:
    """A whole answer."""
    told = [_call(index, call.id, call.name, call.arguments) for index, call in enumerate(answer.tool_calls)]
    calls = [call for call in told if isinstance(call, dict)]
    text = answer.text + "".join(call for call in told if isinstance(call, str))
    logprobs = {"logprobs": _logprobs(answer.tokens)} if telling.scored else {}
    context = {"context": [*head.prompt, *answer.token_ids]} if telling.continues else {}
    said = telling.piece(text, answer.reasoning, calls) | logprobs | context
    return _object(telling.model, said) | _ending(answer.finish_reason, usage)


class AnswerStream:
    """The lines of an answer."""

    content_type: ClassVar[str] = NDJSON

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._piece = telling.piece
        self._context: list[int] = []
        self._sections = Sections()
        self._call: Section | None = None

    def ping(self, why: str) -> bytes:
        return self._line(self._piece())

    def start(self, head: Head) -> Sequence[bytes]:
        self._context += head.prompt
        return []

    def delta(self, delta: Delta) -> Sequence[bytes]:
        lines = []
        self._context += delta.token_ids
        logprobs = {"logprobs": _logprobs(delta.tokens)} if self._telling.scored and delta.tokens else {}
        for section, part, begins, _ in self._sections.feed(delta):
            if begins and self._call is not None:
                lines.append(self._line(self._close_call()))
            if section.kind == "tool_call":
                self._call = section
                continue
            text, thinking = (part, "") if section.kind == "content" else ("", part)
            lines.append(self._line(self._piece(text, thinking) | logprobs))
            logprobs = {}
        return [*lines, self._line(self._piece() | logprobs)] if logprobs else lines

    def finish(self, usage: Usage) -> Sequence[bytes]:
        context = {"context": self._context} if self._telling.continues else {}
        ending = _ending(self._sections.finish_reason, usage)
        return [self._line(self._close_call() | context | ending)]

    def error(self, error: Exception) -> Sequence[bytes]:
        return [json_line(error_object(fault_of(error)))]

    def _close_call(self) -> dict[str, Any]:
        """What says the call that was open, if any."""
        section, self._call = self._call, None
        if section is None:
            return self._piece()
        call = _call(section.call_index or 0, section.call_id, section.name, section.text)
        return self._piece(text=call) if isinstance(call, str) else self._piece(calls=[call])

    def _line(self, fields: dict[str, Any]) -> bytes:
        return json_line(_object(self._telling.model, {"done": False} | fields))


def _call(index: int, call_id: str, name: str, text: str) -> dict[str, Any] | str:
    """A call, or its text where the answer ended before it was whole."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return f"{name}({text}"
    return {"id": call_id, "function": {"index": index, "name": name, "arguments": arguments}}


def _logprobs(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    return [
        _logprob(token.data, token.logprob) | {"top_logprobs": [_logprob(*likely) for likely in token.top]}
        for token in tokens
        if token.shows
    ]


def _logprob(data: bytes, logprob: float | None) -> dict[str, Any]:
    value = _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)
    return {"token": data.decode(errors="replace"), "logprob": value, "bytes": list(data)}
