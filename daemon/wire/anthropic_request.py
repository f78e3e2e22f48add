"""Anthropic's request bodies, parsed strictly and turned into neutral requests.

Source: Anthropic API reference, messages and count_tokens. null means the default, unknown fields are
ignored, and what would change the answer but is not supported is refused by name. Own rules: thinking is
left to the model unless it is asked for or against; tools that only Anthropic's servers run, or whose
schema only its models know, are not offered to the model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quantd.daemon.constraints import Constraint, JsonSchema
from quantd.daemon.errors import ThreadsUnsupportedError
from quantd.daemon.requests import ChatRequest, Options, ToolChoice
from quantd.daemon.wire.anthropic_messages import MessageBody, neutral_messages
from quantd.daemon.wire.body import check_range, function_tool, refuse_unsupported, sampling, stop_strings
from quantd.engine.errors import RequestError
from quantd.engine.request import MAX_TOKENS


class ToolBody(msgspec.Struct, frozen=True):
    """A tool; one with an input_schema is the client's own."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None

    @property
    def is_offered(self) -> bool:
        """Whether a model that knows nothing of Anthropic's own tools can use it."""
        return self.type in (None, "custom")

    def neutral(self, where: str) -> dict[str, Any]:
        """The tool in OpenAI's form. Raises RequestError."""
        if self.name is None or self.input_schema is None:
            missing = "name" if self.name is None else "input_schema"
            raise RequestError(f"{where}.{missing} is missing", f"{where}.{missing}")
        return function_tool(self.name, self.description, self.input_schema, self.strict)


class ToolChoiceBody(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_TOOL_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    format: OutputFormat | None = None
    effort: str | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation; what count_tokens takes."""

    messages: list[MessageBody]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Any = None

    def neutral(self) -> ChatRequest:
        """The neutral request. Raises RequestError."""
        tools = [tool.neutral(f"tools[{i}]") for i, tool in enumerate(self.tools or ()) if tool.is_offered]
        choice, messages = self.tool_choice, neutral_messages(self.system, self.messages)
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=tools or None,
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            thinking=_thinking(self.thinking),
            thinking_tokens=_thinking_tokens(self.thinking),
            template_variables=self._template_variables(),
            continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            options=self._options(),
        )

    def _template_variables(self) -> dict[str, Any]:
        """How hard to think, for templates that ask."""
        effort = None if self.output_config is None else self.output_config.effort
        return {} if effort is None else {"reasoning_effort": effort}

    def _options(self) -> Options:
        return Options()

    @property
    def caches(self) -> bool:
        """Whether it asks for prompt caching, by a cache_control mark on itself or in it."""
        contents = (self.system, *(message.content for message in self.messages))
        blocks = (block for content in contents if isinstance(content, list) for block in content)
        marks = (self.cache_control, *(tool.cache_control for tool in self.tools or ()))
        return any(mark is not None for mark in marks) or any(block.get("cache_control") for block in blocks)


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """A conversation to go on with."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    thread: Any = None
    compaction: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    def neutral(self) -> ChatRequest:
        if self.thread is not None:
            raise ThreadsUnsupportedError("thread: no conversation is kept here; send all of it", "thread")
        refuse_unsupported(self, ("compaction",))
        request = super().neutral()
        if "tool_calls" in request.messages[-1]:
            raise RequestError("messages: the last one calls tools, whose results have to follow", "messages")
        return request

    def _options(self) -> Options:
        if not 0 <= self.max_tokens < 2**31:
            raise RequestError(f"max_tokens must be at least 0, got {self.max_tokens}", "max_tokens")
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        params, left_open = sampling(given, max_tokens=self.max_tokens)
        stop = stop_strings(self.stop_sequences, "stop_sequences")
        return Options(sampling=params, open=left_open, stop=stop, constraint=self._constraint())

    def _constraint(self) -> Constraint | None:
        """What the answer must be, by the present name of the field or the one it had before."""
        config = None if self.output_config is None else self.output_config.format
        format = config or self.output_format
        return None if format is None else JsonSchema(format.schema, "output_config.format")


def _tool_choice(choice: ToolChoiceBody | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    return ToolChoice(_TOOL_MODES[choice.type], (choice.name or "") if choice.type == "tool" else None)


def _thinking(thinking: Thinking | None) -> bool | None:
    """Whether to think; None leaves it to the model, which is what adaptive means."""
    if thinking is None or thinking.type == "adaptive":
        return None
    return thinking.type != "disabled"


def _thinking_tokens(thinking: Thinking | None) -> int | None:
    """How many tokens to think for; None: no limit. Raises RequestError."""
    if thinking is None or thinking.budget_tokens is None:
        return None
    return check_range("thinking.budget_tokens", thinking.budget_tokens, MAX_TOKENS)


class PageQuery(msgspec.Struct, frozen=True):
    """Which page of a list, by the ids beside it."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None
