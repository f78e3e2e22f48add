"""OpenAI's Responses request bodies, parsed strictly and turned into neutral requests.

Source: OpenAI API reference, responses, and what Codex sends. null means the default, unknown fields are
ignored, and what would change the answer but is not supported is refused by name. Own rules: only functions
are offered to the model; truncation "auto" is taken, but nothing is ever cut; a schema is always
enforced; reasoning.effort "none" and "minimal" ask for no reasoning, others for some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from quantd.daemon.constraints import Constraint, JsonObject, JsonSchema
from quantd.daemon.requests import ChatRequest, Options, ToolChoice
from quantd.daemon.response_store import Item
from quantd.daemon.wire.body import check_range, refuse_unsupported, sampling, thinks
from quantd.daemon.wire.responses_input import Content, neutral_messages
from quantd.daemon.wire.responses_tools import ToolBody, flat_name, functions
from quantd.engine.errors import RequestError
from quantd.engine.request import MAX_LOGPROBS

# What `include` names it by.
_LOGPROBS = "message.output_text.logprobs"


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None


Mode: TypeAlias = Literal["none", "auto", "required"]


class ToolChoiceBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool that has to be called, or those that may be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolBody] | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation; what responses/input_tokens takes."""

    model: str | None = None
    input: Content | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Mode | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    prompt: Any = None

    def neutral(self, items: Sequence[Item], num_earlier: int) -> ChatRequest:
        """The neutral request about these items, the first of which are earlier ones. Raises RequestError."""
        refuse_unsupported(self, ("conversation", "prompt"))
        if not items:
            raise RequestError("input must hold at least one item", "input")
        tools = [function.neutral() for function in functions(self.tools or ())]
        effort = None if self.reasoning is None else self.reasoning.effort
        messages = neutral_messages(self.instructions, items, num_earlier)
        if not messages:
            raise RequestError("input: none of its items says anything to the model", "input")
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=tools or None,
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            thinking=thinks(effort),
            template_variables={} if effort is None else {"reasoning_effort": effort},
            options=self._options(),
        )

    def _options(self) -> Options:
        return Options()


class ResponsesBody(CountBody, frozen=True, kw_only=True):
    """A conversation to go on with."""

    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def stored(self) -> bool:
        """Whether the client may come back to the response."""
        return self.store is not False

    @property
    def summarizes(self) -> bool:
        """Whether reasoning is to be told as a summary, for clients that show only those."""
        return self.reasoning is not None and self.reasoning.summary not in (None, "none")

    def _options(self) -> Options:
        self._refuse_unsupported()
        limit = self.max_output_tokens
        if limit is not None and not 1 <= limit < 2**31:
            raise RequestError(f"max_output_tokens must be at least 1, got {limit}", "max_output_tokens")
        given = {"temperature": self.temperature, "top_p": self.top_p}
        params, left_open = sampling(given, max_tokens=limit, logprobs=self._logprobs())
        return Options(sampling=params, open=left_open, constraint=self._constraint())

    def _logprobs(self) -> int | None:
        """How many likeliest tokens to tell with each of the text; None: nothing is asked for."""
        if self.top_logprobs is not None:
            check_range("top_logprobs", self.top_logprobs, MAX_LOGPROBS)
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else self.top_logprobs or None

    def _constraint(self) -> Constraint | None:
        format = None if self.text is None else self.text.format
        if format is None or format.type == "text":
            return None
        if format.schema is not None:
            return JsonSchema(format.schema, "text.format")
        if format.type == "json_schema":
            raise RequestError("text.format.schema is missing", "text.format")
        return JsonObject("text.format")

    def _refuse_unsupported(self) -> None:
        if self.background and not self.stored:
            raise RequestError("background: a response in the background has to be stored", "background")


def _tool_choice(choice: Mode | ToolChoiceBody | None) -> ToolChoice:
    """Raises RequestError for a choice of tools that are never offered."""
    if not isinstance(choice, ToolChoiceBody):
        return ToolChoice(choice or "auto")
    if choice.type == "function":
        return ToolChoice("required", flat_name(choice.namespace, choice.name or ""))
    if choice.type != "allowed_tools":
        what = f"tools of type {choice.type!r} are not offered to the model"
        raise RequestError(f"tool_choice: {what}", "tool_choice")
    names = (tool.name for tool in choice.tools or () if tool.type == "function")
    return ToolChoice(choice.mode or "auto", allowed=tuple(name or "" for name in names))


class RetrieveQuery(msgspec.Struct, frozen=True):
    """How a response is told. starting_after: the event behind which its stream begins."""

    stream: bool | None = None
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ItemQuery(msgspec.Struct, frozen=True):
    """Which page of a response's input items; the latest come first unless told otherwise."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
