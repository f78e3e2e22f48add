"""llama-server's replies and streams (llama.cpp, tools/server: README.md and server-task.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from quantd.daemon.answers import Answer
from quantd.daemon.capabilities import capabilities_of
from quantd.daemon.deltas import Delta, Head, ScoredToken, Usage
from quantd.daemon.generation import Generation
from quantd.daemon.loaded_model import LoadedModel
from quantd.daemon.model_files import USUAL_SAMPLING
from quantd.daemon.wire.errors import Fault, fault_of
from quantd.daemon.wire.llama_server_options import OptionFields
from quantd.daemon.wire.llama_server_replies import LlamaError, LlamaErrorBody
from quantd.daemon.wire.stream import sse_comment, sse_frame
from quantd.daemon.wire.timings import timings
from quantd.engine.config import EngineConfig
from quantd.engine.request import Request, SamplingParams

# JSON has no infinity; llama-server writes the least of all floats.
_MIN_LOGPROB = -3.4028234663852886e38
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_RANDOM_SEED = 2**32 - 1


def llama_error(fault: Fault) -> LlamaErrorBody:
    """llama-server's shape; a prompt that is too long has both numbers."""
    kind = _KINDS.get(fault.status, "server_error" if fault.status >= 500 else "invalid_request_error")
    error: LlamaError = {"code": fault.status, "message": fault.message, "type": kind}
    if fault.context is not None:
        error["type"] = "exceed_context_size_error"
        error["n_prompt_tokens"], error["n_ctx"] = fault.context
    return {"error": error}


class Reply:
    """What the answers to one body of /completion or /infill say."""

    def __init__(self, body: OptionFields, generation: Generation) -> None:
        self._body = body
        self._generation = generation

    def whole(self, answers: Sequence[Answer]) -> Any:
        """One object, or a list for several prompts or choices."""
        replies = [
            self._selected(self.last(answer) | self._probabilities(answer.tokens)) for answer in answers
        ]
        return replies[0] if len(replies) == 1 else replies

    def _probabilities(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        return {"completion_probabilities": token_objects(tokens)} if self._body.n_probs else {}

    def last(self, answer: Answer) -> dict[str, Any]:
        """All that is told of an answer at its end."""
        generation, head = self._generation, self._generation.head
        usage, request = generation.usage_of(answer.index), generation.request(answer.index)
        num_tokens = usage.prompt_tokens + usage.completion_tokens
        return {
            "index": answer.index,
            "content": answer.text,
            "tokens": answer.token_ids if self._body.return_tokens else [],
            "id_slot": self._body.slot,
            "stop": True,
            "model": head.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": settings(request, head.context_len, self._body),
            "prompt": generation.prompt_text(answer.index) if self._wants("prompt") else "",
            "has_new_line": "\n" in answer.text,
            "truncated": head.num_left_out > 0 or num_tokens >= head.context_len,
            "stop_type": _stop_type(answer),
            "stopping_word": answer.stop_string or "",
            "tokens_cached": usage.cached_tokens,
            "timings": timings(usage),
        }

    def _wants(self, name: str) -> bool:
        return not self._body.response_fields or name in self._body.response_fields

    def _selected(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The fields that were asked for; a name with slashes lifts a nested value to the top."""
        names = self._body.response_fields
        if not names:
            return reply
        found = {name: _nested(reply, name.split("/")) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A part of a stream."""
        usage = self._generation.usage_of(delta.index)
        chunk: dict[str, Any] = {
            "index": delta.index,
            "content": delta.text,
            "tokens": list(delta.token_ids),
            "stop": False,
            "id_slot": self._body.slot,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
        }
        if self._body.timings_per_token:
            chunk["timings"] = timings(usage)
        if delta.num_prefilled is not None:
            chunk["prompt_progress"] = _progress(delta.num_prefilled, usage)
        return chunk | (self._probabilities(delta.tokens) if delta.tokens else {})

    def last_chunk(self, delta: Delta, has_new_line: bool) -> dict[str, Any]:
        """The end of a choice's stream, whose text was sent before."""
        answer = Answer(delta.index, finish_reason=delta.finish_reason, stop_string=delta.stop_string)
        return self._selected(self.last(answer) | {"has_new_line": has_new_line})


class CompletionStream:
    """Chunks of content, then all that is told at the end. No `[DONE]`: `stop` is the end."""

    content_type: ClassVar[str] = "text/event-stream"

    def __init__(self, body: OptionFields) -> None:
        self._body = body
        self._reply: Reply
        self._with_lines: set[int] = set()

    def watch(self, generation: Generation) -> None:
        """Take what the frames are about."""
        self._reply = Reply(self._body, generation)

    def ping(self, why: str) -> bytes:
        return sse_comment(why)

    def start(self, head: Head) -> Sequence[bytes]:
        return []

    def delta(self, delta: Delta) -> Sequence[bytes]:
        if "\n" in delta.text:
            self._with_lines.add(delta.index)
        frames = []
        if delta.finish_reason is None or delta.text or delta.tokens:
            frames.append(sse_frame(self._reply.chunk(delta)))
        if delta.finish_reason is not None:
            frames.append(sse_frame(self._reply.last_chunk(delta, delta.index in self._with_lines)))
        return frames

    def finish(self, usage: Usage) -> Sequence[bytes]:
        return []

    def error(self, error: Exception) -> Sequence[bytes]:
        return [sse_frame(llama_error(fault_of(error)))]


def _nested(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _stop_type(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return "limit"
    return "eos" if answer.stop_string is None else "word"


def _progress(num_prefilled: int, usage: Usage) -> dict[str, float]:
    return {
        "total": usage.prompt_tokens,
        "cache": usage.cached_tokens,
        "processed": num_prefilled,
        "time_ms": 1000 * usage.prompt_seconds,
    }


def token_objects(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """completion_probabilities."""
    return [
        _token_object(token.id, token.data, token.logprob)
        | {
            "top_logprobs": [
                _token_object(token_id, data, logprob)
                for token_id, (data, logprob) in zip(token.top_ids, token.top, strict=True)
            ]
        }
        for token in tokens
    ]


def _token_object(token_id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
    text = data.decode(errors="ignore")
    known = _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)
    return {"id": token_id, "token": text, "bytes": list(data), "logprob": known}


def settings(request: Request, context_len: int, body: OptionFields) -> dict[str, Any]:
    """generation_settings: what was asked, with the defaults filled in."""
    biases = request.sampling.logit_bias.items()
    return sampling_object(request.sampling) | {
        "n_ctx": context_len,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        "ignore_eos": bool(body.ignore_eos),
        "stream": body.streams,
        "logit_bias": [{"token": token_id, "bias": bias} for token_id, bias in biases],
        "n_probs": body.n_probs or 0,
        "grammar": body.grammar or "",
        "timings_per_token": bool(body.timings_per_token),
    }


def sampling_object(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling by llama-server's names; what is not here is off."""
    limit = -1 if sampling.max_tokens is None else sampling.max_tokens
    return {
        "seed": _RANDOM_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": 0.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "typical_p": 1.0,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": 0.0,
        "mirostat": 0,
        "max_tokens": limit,
        "n_predict": limit,
        "n_keep": 0,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "lora": [],
    }


def props_object(model: LoadedModel, config: EngineConfig, version: str) -> dict[str, Any]:
    """/props of a loaded model."""
    template = model.tokenizer.template
    able = capabilities_of(model.tokenizer)
    return {
        "default_generation_settings": slot_object(0, False, model),
        "total_slots": config.max_num_requests,
        "model_alias": model.name,
        "model_path": config.model_path,
        "chat_template": "" if template is None else template.source,
        "chat_template_caps": {"supports_tools": able.tools, "supports_tool_calls": able.tools},
        "modalities": {"vision": False, "audio": False},
        "build_info": f"quantd-{version}",
        "is_sleeping": False,
    }


def slot_object(slot: int, is_busy: bool, model: LoadedModel) -> dict[str, Any]:
    """A slot, of which all have the same context and defaults."""
    defaults = msgspec.convert(model.sampling_defaults(USUAL_SAMPLING), SamplingParams)
    return {
        "id": slot,
        "n_ctx": model.context_len,
        "speculative": False,
        "is_processing": is_busy,
        "params": sampling_object(defaults),
    }
