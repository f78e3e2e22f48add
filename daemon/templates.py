"""Chat templates: Jinja as transformers runs it, in a sandbox, with its reasons for refusing passed on.

A template is a program of whoever wrote the model. What runs it is given to it: the daemon has processes for
that (see template_process), which bound its time and memory.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantd.daemon.control_tokens import MARK
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

Message = dict[str, Any]
Renderer = Callable[[str, Mapping[str, Any]], str]
"""Gives the text of a template's source with some variables. Raises RequestError."""

# The longest of models have a quarter of it; reading it takes a second or so.
_MOST_SOURCE = 1 << 17
_MOST_TEXT = 1 << 26
_MOST_REASON = 1000

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

    special_tokens: the names that templates use for them, such as bos_token. Nothing of it runs here, as it
    would if it were compiled, which computes what is constant.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], run: Renderer | None = None) -> None:
        if len(source) > _MOST_SOURCE:
            raise CheckpointError(f"the model's chat template is longer than {_MOST_SOURCE} characters")
        try:
            _environment().parse(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template is not valid: {error}") from error
        except RecursionError:
            raise CheckpointError("the model's chat template is nested too deeply") from None
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._run = run or run_template

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
        return self._run(
            self.source,
            self._special_tokens
            | {"add_generation_prompt": True}
            | dict(variables or {})
            | {"messages": messages, "tools": tools or None, "documents": documents or None},
        )


def run_template(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a template, which may take any time and memory. Raises RequestError."""
    try:
        pieces, size = [], 0
        for piece in _compiled(source).generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_TEXT:
                raise RequestError(
                    f"the model's chat template writes more than {_MOST_TEXT} characters", "messages"
                )
        return "".join(pieces)
    except RequestError:
        raise
    except jinja2.TemplateError as error:
        reason = str(error)[:_MOST_REASON]
        raise RequestError(f"the model's chat template refuses this: {reason}", "messages") from error
    # A template is a program from the model's folder; whatever it trips over lies in the pair of it
    # and these messages.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:_MOST_REASON]
        raise RequestError(
            f"the model's chat template fails on these messages: {reason}", "messages"
        ) from error


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


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
