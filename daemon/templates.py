"""Chat templates: Jinja as transformers runs it, in a sandbox, with its reasons for refusing passed on."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantd.daemon.control_tokens import MARK
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

Message = dict[str, Any]

# A mark as JSON in ASCII has it, with the escaped backslashes before it.
_ESCAPED_MARK = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(MARK):04x}")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's chat template. Raises CheckpointError where `source` is no valid Jinja.

    special_tokens: the names that templates use for them, such as bos_token. variables: the names that it
    looks up.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template is not valid: {error}") from error
        self.source = source
        self.variables = frozenset(variables)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that ends where the assistant's answer begins.

        Raises RequestError with the template's own reason where it refuses the messages.
        """
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
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _ESCAPED_MARK.sub(rf"\1{MARK}", text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
