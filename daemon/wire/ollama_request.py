"""Ollama's request bodies for generate and chat, turned into neutral requests.

Source: ollama/ollama, api/types.go and docs/api.md. As there, unknown fields and options are ignored, and
numbers need not be written as whole ones. Own rules, where Ollama would change the answer without a word: a
prompt that does not fit is refused unless the request itself says `truncate`; num_ctx bounds the request
and reloads nothing; samplers that are not here are refused by name; penalties look at all of a request;
a suffix that is there is infill, also an empty one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from quantd.daemon.capabilities import Capabilities
from quantd.daemon.constraints import Constraint, JsonObject, JsonSchema
from quantd.daemon.durations import parse_duration
from quantd.daemon.infill import InfillText
from quantd.daemon.requests import ChatRequest, CompletionRequest, InfillRequest, Options
from quantd.daemon.templates import Message
from quantd.daemon.wire.body import check_range, sampling, stop_strings
from quantd.daemon.wire.ollama_messages import MessageBody, neutral_messages, refuse_images
from quantd.engine.errors import RequestError
from quantd.engine.request import INT64_MAX, MAX_LOGPROBS

Number: TypeAlias = int | float
Duration: TypeAlias = int | float | str

# What Ollama takes where neither the request nor the model's author says anything.
_USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# Samplers that are not here, each with the value that switches it off.
_OFF = {"typical_p": 1, "tfs_z": 1, "mirostat": 0}
# Penalties, with what they are called elsewhere and the value that switches them off.
_PENALTIES = {
    "repeat_penalty": ("repetition_penalty", 1.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
}
# repeat_last_n: all of the context, or what is meant where nothing is said.
_WHOLE_WINDOWS = (None, -1, 64)
_THINK_LEVELS = ("low", "medium", "high", "max")


class OptionsBody(msgspec.Struct, frozen=True, kw_only=True):
    """`options`. Those that say where and how to load a model (num_gpu, use_mmap, ...) are the daemon's."""

    num_ctx: Number | None = None
    num_predict: Number | None = None
    seed: Number | None = None
    temperature: float | None = None
    top_k: Number | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: Number | None = None
    repeat_last_n: Number | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    keep_alive: Duration | None = None

    def neutral(
        self, constraint: Constraint | None, logprobs: int | None, keep_alive: float | None
    ) -> Options:
        """The neutral options. Raises RequestError naming an option that is out of bounds or unsupported."""
        for name, off in _OFF.items():
            if getattr(self, name) not in (None, off):
                raise RequestError(f"options.{name} is not supported; its value {off} is", f"options.{name}")
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p")}
        seed = self._whole("seed", -INT64_MAX - 1)
        given |= {"top_k": self._whole("top_k", -1), "seed": None if seed == -1 else seed}
        given |= self._penalties()
        params, left_open = sampling(given, max_tokens=self._max_tokens(), logprobs=logprobs)
        return Options(
            sampling=params,
            open=left_open,
            usual=_USUAL,
            stop=stop_strings(self.stop, "options.stop"),
            constraint=constraint,
            context_len=self.context_len,
            keep_alive=keep_alive,
        )

    @property
    def context_len(self) -> int | None:
        """A bound of the request's own; 0 is none. Raises RequestError."""
        return self._whole("num_ctx", 0) or None

    def _max_tokens(self) -> int | None:
        """-1 is no limit, and -2 the end of the context, which is no other."""
        limit = self._whole("num_predict", -2)
        return None if limit is None or limit < 0 else limit

    def _penalties(self) -> dict[str, float | None]:
        window = self._whole("repeat_last_n", -1)
        if window == 0:
            return dict(_PENALTIES.values())
        for name, (_, off) in _PENALTIES.items():
            if window not in _WHOLE_WINDOWS and getattr(self, name) not in (None, off):
                raise RequestError(
                    f"options.repeat_last_n: {window} is not supported, {name} looks at all of a request",
                    "options.repeat_last_n",
                )
        return {neutral: getattr(self, name) for name, (neutral, _) in _PENALTIES.items()}

    def _whole(self, name: str, low: int) -> int | None:
        """A whole number from `low`, also where it is written with a fraction of zero."""
        value: int | float | None = getattr(self, name)
        broken = isinstance(value, float) and not value.is_integer()
        if value is not None and (broken or value < low):
            raise RequestError(
                f"options.{name} must be a whole number from {low}, got {value}", f"options.{name}"
            )
        return None if value is None else int(value)


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share."""

    model: str = ""
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    keep_alive: Duration | None = None
    options: OptionsBody | None = None
    think: bool | str | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def stay(self) -> float | None:
        """How long the model is to stay in memory, in seconds; some clients say so among the options."""
        given = self.keep_alive
        if given is None and self.options is not None:
            given = self.options.keep_alive
        return None if given is None else duration(given)

    def neutral_options(self) -> Options:
        """Raises RequestError."""
        if self.shift:
            raise RequestError("shift: an answer ends with its context; leave it out or false", "shift")
        options = self.options or OptionsBody()
        return options.neutral(constraint_of(self.format), self._num_logprobs(), self.stay)

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None:
            check_range("top_logprobs", self.top_logprobs, MAX_LOGPROBS)
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat(self, messages: list[Message], can: Capabilities, **others: Any) -> ChatRequest:
        """The conversation as a request. others: fields that only one endpoint has. Raises RequestError."""
        level = self.think if isinstance(self.think, str) else None
        if level is not None and level not in _THINK_LEVELS:
            raise RequestError(
                f"think must be true, false or one of {', '.join(_THINK_LEVELS)}, got {level!r}", "think"
            )
        if self.think and not can.thinking:
            raise lacks(self.model, "thinking", "think")
        return ChatRequest(
            model=self.model,
            messages=messages,
            thinking=None if self.think is None else bool(self.think),
            template_variables={} if level is None else {"reasoning_effort": level},
            truncate=bool(self.truncate),
            options=self.neutral_options(),
            **others,
        )


class GenerateBody(_Fields, frozen=True, kw_only=True):
    """POST /api/generate"""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    @property
    def asks_nothing(self) -> bool:
        """Whether it is only about the model in memory."""
        return not self.prompt and not self.suffix

    def neutral(self, can: Capabilities) -> ChatRequest | CompletionRequest | InfillRequest:
        """The neutral request to a model that can so much. Raises RequestError."""
        refuse_images(self.images, "images")
        prompt = self.prompt or ""
        if self.suffix is not None:
            self._refuse_chat_fields("a suffix")
            if can.infill is None:
                raise lacks(self.model, "insert", "suffix")
            text = InfillText(prefix=prompt, suffix=self.suffix)
            return InfillRequest(model=self.model, text=text, options=self.neutral_options())
        if self.raw:
            self._refuse_chat_fields("raw")
        if self.raw or not (can.chat or self.template):
            return CompletionRequest(model=self.model, prompts=[prompt], options=self.neutral_options())
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": prompt}]
        return self.chat(messages, can, template=self.template or None, history=self.context or ())

    def _refuse_chat_fields(self, why: str) -> None:
        for name in ("template", "system", "context"):
            if getattr(self, name):
                raise RequestError(f"{name} does not go with {why}, which takes the prompt as it is", name)


class ChatBody(_Fields, frozen=True, kw_only=True):
    """POST /api/chat"""

    messages: list[MessageBody] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def asks_nothing(self) -> bool:
        """Whether it is only about the model in memory."""
        return not self.messages

    def neutral(self, can: Capabilities) -> ChatRequest:
        """The neutral request to a model that can so much. Raises RequestError."""
        if self.tools and not can.tools:
            raise lacks(self.model, "tools", "tools")
        messages = neutral_messages(self.messages or [])
        # As there, an answer that has begun goes on.
        begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        return self.chat(messages, can, tools=self.tools or None, continues=begun)


def lacks(model: str, capability: str, param: str) -> RequestError:
    """What a model cannot do, in Ollama's words, by which clients know it."""
    return RequestError(f'"{model}" does not support {capability}', param)


def duration(given: Duration) -> float:
    """A keep_alive in seconds, infinity for ever. Raises RequestError."""
    try:
        return parse_duration(given)
    except ValueError:
        raise RequestError(
            f"keep_alive must be seconds or a duration such as 5m, or negative, got {given!r}", "keep_alive"
        ) from None


def constraint_of(format: str | dict[str, Any] | None) -> Constraint | None:
    """What `format` wants of an answer. Raises RequestError."""
    if format is None or format == "":
        return None
    if isinstance(format, dict):
        return JsonSchema(format, "format")
    if format != "json":
        raise RequestError(f'format must be "json" or a JSON schema, got {format!r}', "format")
    return JsonObject("format")
