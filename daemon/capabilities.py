"""What a model can do beside going on with a text, told from its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from quantd.daemon.infill_formats import format_of
from quantd.daemon.model_files import read_json
from quantd.daemon.reasoning import reasoning_tags
from quantd.daemon.template_files import template_source
from quantd.daemon.templates import ChatTemplate
from quantd.daemon.tokenizer import Tokenizer
from quantd.quant.errors import CheckpointError


@dataclass(frozen=True)
class Capabilities:
    """chat: has a template. tools: takes tools, which every template can be told of (see ToolPrompts).

    thinking: the model may reason before it answers.

    infill: the family whose prompts towards a suffix the model knows, None for none.
    """

    chat: bool
    tools: bool
    thinking: bool
    infill: str | None

    @property
    def names(self) -> list[str]:
        """Those there are, in words."""
        return [field.name for field in fields(self) if getattr(self, field.name)]


def capabilities_of(tokenizer: Tokenizer) -> Capabilities:
    """Of a model whose tokenizer is loaded."""
    return _capabilities(lambda name: tokenizer.token_id(name) is not None, tokenizer.template)


def read_capabilities(folder: Path) -> Capabilities:
    """Of a model on disk, read without its tokenizer. Raises CheckpointError for a file that is not valid."""
    source = template_source(folder, read_json(folder / "tokenizer_config.json"))
    return _capabilities(
        _added_tokens(folder).__contains__, None if source is None else ChatTemplate(source, {})
    )


def _capabilities(has_token: Callable[[str], bool], template: ChatTemplate | None) -> Capabilities:
    format = format_of(has_token)
    return Capabilities(
        chat=template is not None,
        tools=template is not None,
        thinking=template is not None and reasoning_tags(template.source) is not None,
        infill=None if format is None else format.family,
    )


class _AddedToken(msgspec.Struct, frozen=True):
    content: str


class _TokenizerFile(msgspec.Struct, frozen=True):
    """What is read of tokenizer.json here; the rest, which takes long, is skipped."""

    added_tokens: list[_AddedToken] = []


def _added_tokens(folder: Path) -> set[str]:
    file = folder / "tokenizer.json"
    try:
        return {
            token.content
            for token in msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).added_tokens
        }
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: not a valid tokenizer: {error}") from error
