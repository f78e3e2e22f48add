"""Chat templates: Jinja as transformers runs it, in a sandbox, with its reasons for refusing passed on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

Message = dict[str, Any]

# Variables that switch a model's reasoning on and off, and tags that templates put around it.
_THINKING = {"enable_thinking", "thinking", "reasoning_effort"}
_THINK_MARKS = ("<think>", "[THINK]")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's chat template. Raises CheckpointError where `source` is no valid Jinja.

    special_tokens: the names that templates use for them, such as bos_token. takes_tools: whether it has a
    place for tools. thinks: whether its model may reason before it answers.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template is not valid: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in variables
        self._takes_calls = "tool_calls" in source
        self.thinks = bool(_THINKING & variables) or any(mark in source for mark in _THINK_MARKS)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that ends where the assistant's answer begins.

        Raises RequestError with the template's own reason where it refuses the messages, and where it
        would leave out tools or tool calls without a word.
        """
        self._check_tools(messages, tools)
        try:
            return self._template.render(
                **self._special_tokens
                | {"add_generation_prompt": True}
                | dict(variables or {})
                | {"messages": messages, "tools": tools or None, "documents": documents or None}
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses this: {error}", "messages") from error
        # A template is a program from the model's folder; whatever it trips over lies in the pair of it
        # and these messages.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"the model's chat template fails on these messages: {reason}", "messages"
            ) from error

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[object] | None) -> None:
        if tools and not self.takes_tools:
            raise RequestError("this model's chat template has no place for tools", "tools")
        if any(message.get("tool_calls") for message in messages) and not self._takes_calls:
            raise RequestError("this model's chat template has no place for tool calls", "messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which is wrong in a prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
