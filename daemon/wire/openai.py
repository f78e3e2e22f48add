"""OpenAI's replies and streams: chat/completions, completions and models (OpenAI API reference).

Token texts in log probabilities that are no whole characters are written `bytes:\\xNN`, as OpenAI does.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from quantd.daemon.answers import Answer
from quantd.daemon.deltas import Delta, Head, ScoredToken, Usage
from quantd.daemon.loaded_model import LoadedModel
from quantd.daemon.models import StoredModel
from quantd.daemon.wire.errors import fault_of, openai_error
from quantd.daemon.wire.openai_replies import ChatLogprobs, ScoredEntry, TokenEntry
from quantd.daemon.wire.stream import sse_comment, sse_frame
from quantd.daemon.wire.timings import timings

# JSON has no infinity; OpenAI writes this for a token that cannot be.
_MIN_LOGPROB = -9999.0

CHAT_ID = "chatcmpl"
COMPLETION_ID = "cmpl"


class _Stream(ABC):
    """What the two streams share: chunks with one id, usage if asked, `[DONE]`; timings in the last chunk."""

    content_type: ClassVar[str] = "text/event-stream"
    object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, scored: bool, wants_usage: bool) -> None:
        self._scored = scored
        self._wants_usage = wants_usage
        self._head: dict[str, Any] = {}
        self._ending: list[dict[str, Any]] = []

    def ping(self, why: str) -> bytes:
        return sse_comment(why or "ping")

    def start(self, head: Head) -> Sequence[bytes]:
        self._head = reply_head(self.id_prefix, self.object, head)
        return []

    def delta(self, delta: Delta) -> Sequence[bytes]:
        """The end of a choice is held back until it is known whether it is that of all."""
        held, self._ending = self._ending, []
        chunks = [*held, *self._chunks(delta)]
        if delta.finish_reason is not None:
            self._ending = [chunks.pop()]
        return [sse_frame(chunk) for chunk in chunks]

    @abstractmethod
    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta; the one that ends its choice is the last."""

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"choices": choices} | ({"usage": None} if self._wants_usage else {})

    def finish(self, usage: Usage) -> Sequence[bytes]:
        asked = [self._head | {"choices": [], "usage": usage_object(usage)}] if self._wants_usage else []
        *before, last = [*self._ending, *asked]
        chunks = [*before, last | {"timings": timings(usage)}]
        return [*(sse_frame(chunk) for chunk in chunks), b"data: [DONE]\n\n"]

    def error(self, error: Exception) -> Sequence[bytes]:
        held = [sse_frame(chunk) for chunk in self._ending]
        return [*held, sse_frame(openai_error(fault_of(error)))]


class ChatStream(_Stream):
    """chat.completion.chunk events. names_function: whether the request named the function to call."""

    object = "chat.completion.chunk"
    id_prefix = CHAT_ID

    def __init__(self, scored: bool, wants_usage: bool, names_function: bool = False) -> None:
        super().__init__(scored, wants_usage)
        self._names_function = names_function

    def start(self, head: Head) -> Sequence[bytes]:
        super().start(head)
        opening = {"role": "assistant", "content": ""}
        return [sse_frame(self._choice(index, opening, (), None)) for index in range(head.num_choices)]

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks, tokens = [], delta.tokens
        for part in _message_parts(delta):
            chunks.append(self._choice(delta.index, part, tokens, None))
            tokens = ()
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, self._names_function)
            chunks.append(self._choice(delta.index, {}, (), reason))
        return chunks

    def _choice(
        self, index: int, delta: dict[str, Any], tokens: Sequence[ScoredToken], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(tokens) if self._scored and tokens else None
        return self._chunk(
            [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]
        )


def _message_parts(delta: Delta) -> list[dict[str, Any]]:
    """The parts of a message that a delta brings. A call opens by itself, without arguments."""
    parts: list[dict[str, Any]] = []
    if delta.reasoning:
        parts.append(_reasoning(delta.reasoning))
    if (call := delta.tool_call) is not None:
        if call.name is not None:
            function = {"name": call.name, "arguments": ""}
            opened = {"index": call.index, "id": call.id, "type": "function", "function": function}
            parts.append({"tool_calls": [opened]})
        if call.arguments:
            parts.append({"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]})
    if delta.text or (delta.tokens and not parts):
        parts.append({"content": delta.text})
    return parts


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients look for: vLLM's and DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}


def _finish_reason(reason: str | None, names_function: bool) -> str | None:
    """A call of the function that the request named is no reason of its own to stop."""
    return "stop" if reason == "tool_calls" and names_function else reason


class CompletionStream(_Stream):
    """text_completion events."""

    object = "text_completion"
    id_prefix = COMPLETION_ID

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        logprobs = completion_logprobs(delta.tokens) if self._scored else None
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs}
        return [self._chunk([choice | {"finish_reason": delta.finish_reason}])]


def reply_head(id_prefix: str, kind: str, head: Head) -> dict[str, Any]:
    """What every reply and chunk begins with."""
    id = f"{id_prefix}-{head.id}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": head.model}


def chat_reply(
    head: Head, answers: Sequence[Answer], scored: bool, usage: Usage, names_function: bool = False
) -> dict[str, Any]:
    """A whole chat.completion. names_function: see ChatStream."""
    choices = [
        {
            "index": answer.index,
            "message": _message(answer),
            "logprobs": chat_logprobs(answer.tokens) if scored else None,
            "finish_reason": _finish_reason(answer.finish_reason, names_function),
        }
        for answer in answers
    ]
    return _reply(reply_head(CHAT_ID, "chat.completion", head), choices, usage)


def _message(answer: Answer) -> dict[str, Any]:
    content = None if answer.tool_calls and not answer.text else answer.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def completion_reply(head: Head, answers: Sequence[Answer], scored: bool, usage: Usage) -> dict[str, Any]:
    """A whole text_completion."""
    choices = [
        {
            "index": answer.index,
            "text": answer.text,
            "logprobs": completion_logprobs(answer.tokens) if scored else None,
            "finish_reason": answer.finish_reason,
        }
        for answer in answers
    ]
    return _reply(reply_head(COMPLETION_ID, "text_completion", head), choices, usage)


def _reply(head: dict[str, Any], choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return head | {"choices": choices, "usage": usage_object(usage), "timings": timings(usage)}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chat_logprobs(tokens: Sequence[ScoredToken]) -> ChatLogprobs:
    """The chat shape; the bytes of all entries join to the text."""
    return {"content": scored_entries(tokens), "refusal": None}


def scored_entries(tokens: Sequence[ScoredToken]) -> list[ScoredEntry]:
    """Those of a text's tokens."""
    return [
        {
            **_entry(token.data, token.logprob),
            "top_logprobs": [_entry(data, logprob) for data, logprob in token.top],
        }
        for token in tokens
        if token.shows
    ]


def _entry(data: bytes, logprob: float | None) -> TokenEntry:
    assert logprob is not None, "only the first token of a prompt has none"
    return {"token": token_text(data), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(data)}


def completion_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """The older shape: parallel lists; the first token of a prompt has null."""
    return {
        "tokens": [token_text(token.data) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _likeliest(token: ScoredToken) -> dict[str, float | None] | None:
    """The likeliest by text, the token itself among them."""
    if token.logprob is None:
        return None
    pairs = (*token.top, (token.data, token.logprob))
    return {token_text(data): _finite(logprob) for data, logprob in pairs}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)


def token_text(data: bytes) -> str:
    """A token's bytes as text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def model_object(stored: StoredModel, context_len: int | None, model: LoadedModel | None) -> dict[str, Any]:
    """One entry of /v1/models, with vLLM's extras, and llama-server's for a model in memory."""
    entry = {"id": stored.name, "object": "model", "created": int(stored.created), "owned_by": "quantd"}
    if context_len is not None:
        entry |= {"max_model_len": context_len, "context_length": context_len}
    if model is None:
        return entry | {"meta": None}
    info = model.engine.info
    meta = {
        "n_ctx": context_len,
        "n_ctx_train": context_len,
        "n_vocab": info.vocab_size,
        "n_embd": info.hidden_size,
        "size": info.weight_bytes,
    }
    return entry | {"meta": meta}
