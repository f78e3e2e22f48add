"""OpenAI's request bodies, parsed strictly and turned into neutral requests.

Source: OpenAI API reference, chat/completions and completions, with the extras that local clients send
(top_k, min_p, repetition_penalty or repeat_penalty, min_tokens, stop_token_ids, ignore_eos, cache_salt,
chat_template_kwargs, n_predict). null means the default, unknown fields are ignored, no value is coerced,
and what would change the answer but is not supported is refused by name. Own rules: sampling fields default
to the model's own; max_tokens -1 is "no limit"; stream_options without stream is ignored; empty stop strings
are none; text parts are joined by a newline; token ids of padded embedding rows, which have no text, are
accepted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quantd.daemon.constraints import Constraint, JsonSchema, written_grammar
from quantd.daemon.infill import InfillText
from quantd.daemon.requests import ChatRequest, CompletionRequest, InfillRequest, Options
from quantd.daemon.templates import Message
from quantd.daemon.wire.body import (
    MAX_CHOICES,
    SAMPLING_FIELDS,
    check_range,
    read_arguments,
    sampling,
    stop_strings,
    texts_or_ids,
    thinks,
)
from quantd.daemon.wire.openai_tools import (
    Choice,
    Effort,
    FunctionChoice,
    functions,
    tool_choice,
)
from quantd.daemon.wire.structured import (
    ResponseFormat,
    StructuredOutputs,
    format_constraint,
    only,
    structured,
)
from quantd.engine.errors import RequestError
from quantd.engine.request import MAX_LOGPROBS, MAX_TOKENS

COMPLETION_TOKENS = 16


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def options(self, max_tokens: int | None, logprobs: int | None) -> Options:
        """The neutral options. Raises RequestError naming a field that is out of bounds or unsupported."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise RequestError(f"n must be between 1 and {MAX_CHOICES}, got {n}", "n")
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        if self.repetition_penalty is None:
            given["repetition_penalty"] = self.repeat_penalty
        params, left_open = sampling(
            given,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=None if max_tokens == -1 else max_tokens,
            logprobs=logprobs,
        )
        return Options(
            sampling=params,
            open=left_open,
            n=n,
            stop=stop_strings(self.stop),
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            constraint=self._constraint(),
        )

    def _constraint(self) -> Constraint | None:
        """The one form that the answer must have. Raises RequestError where it is asked for two."""
        return only(
            [
                format_constraint(self.response_format),
                written_grammar(self.grammar, "grammar") if self.grammar else None,
                None if self.json_schema is None else JsonSchema(self.json_schema, "json_schema"),
                structured(self.structured_outputs, "structured_outputs"),
                structured(self._guided(), "guided_"),
            ]
        )

    def _guided(self) -> StructuredOutputs:
        """vLLM's older names for the fields of structured_outputs."""
        return StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            whitespace_pattern=self.guided_whitespace_pattern,
        )


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class MessageBody(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatBody(_Fields, frozen=True, kw_only=True):
    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    functions: Any = None
    function_call: Any = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def neutral(self) -> ChatRequest:
        """The neutral request. Raises RequestError."""
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not supported; send tools and tool_choice instead", name)
        if not self.messages:
            raise RequestError("messages must hold at least one message", "messages")
        return ChatRequest(
            model=self.model,
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)],
            tools=functions(self.tools) if self.tools else None,
            tool_choice=tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            thinking=thinks(self.reasoning_effort),
            thinking_tokens=self._thinking_tokens(),
            documents=self.documents,
            template_variables=self._template_variables(),
            options=self.options(self._max_tokens(), self._num_logprobs()),
        )

    @property
    def names_function(self) -> bool:
        """Whether one function is named to be called."""
        return isinstance(self.tool_choice, FunctionChoice)

    def _template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    def _thinking_tokens(self) -> int | None:
        """By vLLM's name, or either of llama-server's; -1 is no limit."""
        names = ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
        given = ((name, getattr(self, name)) for name in names)
        name, budget = next(((name, value) for name, value in given if value is not None), (names[0], -1))
        return None if budget == -1 else check_range(name, budget, MAX_TOKENS)

    def _max_tokens(self) -> int | None:
        """The first limit given; llama-server's name for it may ask for the prompt alone."""
        least = {"max_completion_tokens": 1, "max_tokens": 1, "n_predict": 0}
        name = next((name for name in least if getattr(self, name) is not None), "max_tokens")
        limit: int | None = getattr(self, name)
        if limit is not None and not (limit == -1 or least[name] <= limit < 2**31):
            raise RequestError(
                f"{name} must be at least {least[name]}, or -1 for no limit, got {limit}", name
            )
        return limit

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        check_range("top_logprobs", self.top_logprobs, MAX_LOGPROBS)
        if not self.logprobs and self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None


class CompletionBody(_Fields, frozen=True, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def neutral(self) -> CompletionRequest | InfillRequest:
        """The neutral request; one with a suffix, be it empty, is a gap to fill. Raises RequestError."""
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of: only the value of n is supported", "best_of")
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, MAX_LOGPROBS)
        limits = (self.max_tokens, self.n_predict, COMPLETION_TOKENS)
        max_tokens = next(limit for limit in limits if limit is not None)
        options = self.options(max_tokens, self.logprobs)
        if self.suffix is not None:
            text = InfillText(prefix=self._prefix(), suffix=self.suffix)
            return InfillRequest(model=self.model, text=text, options=options)
        return CompletionRequest(
            model=self.model, prompts=_prompts(self.prompt), echo=bool(self.echo), options=options
        )

    def _prefix(self) -> str:
        """The text before the gap: a prompt beside a suffix is one text."""
        if self.echo:
            raise RequestError("echo is not supported together with suffix", "echo")
        prompts = _prompts(self.prompt)
        if len(prompts) != 1 or not isinstance(prompts[0], str):
            raise RequestError("prompt must be one text where there is a suffix", "prompt")
        return prompts[0]


class FimBody(_Fields, frozen=True, kw_only=True):
    """Mistral's fim/completions (Mistral API reference): a gap after `prompt`, whatever follows it."""

    prompt: str
    suffix: str | None = None
    random_seed: int | None = None

    def neutral(self) -> InfillRequest:
        """The neutral request. Raises RequestError."""
        seeded = self if self.random_seed is None else msgspec.structs.replace(self, seed=self.random_seed)
        return InfillRequest(
            model=self.model,
            text=InfillText(prefix=self.prompt, suffix=self.suffix or ""),
            options=seeded.options(self.max_tokens, None),
        )


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _message(message: MessageBody, where: str) -> Message:
    """A message as templates read it: content a text, arguments of calls an object."""
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{where}.role: {message.role!r} is not one of {', '.join(_ROLES)}", f"{where}.role"
        )
    if message.content is None and role != "assistant":
        raise RequestError(f"{where}.content is missing", f"{where}.content")
    neutral: Message = {"role": role, "content": _content_text(message.content, f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            neutral[name] = getattr(message, name)
    if thoughts := message.reasoning_content or message.reasoning:
        neutral["reasoning_content"] = thoughts
    if message.tool_calls:
        neutral["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return neutral


def _content_text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for i, part in enumerate(content):
        if part.get("type") != "text":
            kind = part.get("type")
            raise RequestError(f"{where}[{i}]: parts of type {kind!r} are not supported, only text", where)
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}].text must be a string", f"{where}[{i}].text")
    return "\n".join(part["text"] for part in content)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": read_arguments(call.function.arguments)}
    return {"type": call.type, "function": function} | ({} if call.id is None else {"id": call.id})


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    prompts = texts_or_ids(prompt, "prompt")
    if len(prompts) > MAX_CHOICES:
        raise RequestError(f"prompt must hold at most {MAX_CHOICES} prompts, got {len(prompts)}", "prompt")
    return prompts
