"""TOML, through tomlkit, which keeps comments, order and spelling."""

from __future__ import annotations

from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError
from tomlkit.items import InlineTable

from quantd.daemon.connect.document import Item, TreeDocument
from quantd.daemon.errors import ConfigError


class TomlDocument(TreeDocument):
    """A TOML file."""

    def __init__(self, text: str) -> None:
        try:
            super().__init__(tomlkit.parse(text))
        except ParseError as error:
            reason = str(error).split(" at line ")[0]
            raise ConfigError(f"line {error.line}: not valid TOML: {reason}") from None

    def text(self) -> str:
        return tomlkit.dumps(self.root)

    def _container(self, step: str | Item, parent: Any) -> Any:
        if isinstance(step, Item):
            return tomlkit.array()
        return tomlkit.inline_table() if isinstance(parent, InlineTable) else tomlkit.table()
