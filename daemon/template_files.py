"""The chat templates of a model folder, by name, from Hugging Face's files.

Those are chat_template.jinja, additional_chat_templates/NAME.jinja, and the chat_template of
tokenizer_config.json, which is a text or a list of named ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantd.quant.errors import CheckpointError

DEFAULT = "default"
TOOL_USE = "tool_use"
"""A template for requests with tools, where a model has one of its own for them."""


def template_source(folder: Path, config: dict[str, Any], name: str = DEFAULT) -> str | None:
    """A chat template; a file of its own goes before tokenizer_config.json, whose content is config.

    Raises CheckpointError for a file that cannot be read.
    """
    files = [folder / "additional_chat_templates" / f"{name}.jinja"]
    if name == DEFAULT:
        files.insert(0, folder / "chat_template.jinja")
    for file in files:
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, UnicodeError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from error
    template = _configured(config.get("chat_template"), name)
    return template if isinstance(template, str) else None


def _configured(templates: object, name: str) -> object:
    """Of a list without a default the first one is it."""
    if not isinstance(templates, list):
        return templates if name == DEFAULT else None
    entries = [entry for entry in templates if isinstance(entry, dict)]
    named = {str(entry.get("name")): entry.get("template") for entry in entries}
    return named.get(name) or (next(iter(named.values()), None) if name == DEFAULT else None)
