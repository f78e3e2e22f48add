"""The formats of configuration files, by the names that tools and records use for them."""

from __future__ import annotations

from collections.abc import Mapping

from quantd.daemon.connect.document import Format
from quantd.daemon.connect.json_document import JsonDocument
from quantd.daemon.connect.text_documents import ElispBlocks, OwnFile
from quantd.daemon.connect.toml_document import TomlDocument
from quantd.daemon.connect.yaml_document import YamlDocument

FORMATS: Mapping[str, Format] = {
    "json": JsonDocument,
    "yaml": YamlDocument,
    "toml": TomlDocument,
    "elisp": ElispBlocks,
    "own": OwnFile,
}
