"""What was written into the files of other programs, kept for the day it is to be undone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from quantd.daemon.connect.files import read_file, remove_file, replace_file
from quantd.daemon.connect.merge import Change
from quantd.daemon.errors import ConfigError


class Written(msgspec.Struct, frozen=True):
    """A file that was written. backup: the file as it was; None where there was none.

    sha256: of the bytes written. folders: those made for it, innermost first.
    """

    file: str
    format: str
    backup: str | None
    sha256: str
    changes: list[Change]
    folders: list[str]


class Journal:
    """The records of each tool, in a folder that need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, tool: str) -> list[Written]:
        """Raises ConfigError where the record is damaged."""
        data = read_file(self._path(tool))
        try:
            return [] if data is None else msgspec.json.decode(data, type=list[Written])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._path(tool)}: not a record of quantd connect: {error}") from None

    def save(self, tool: str, records: Sequence[Written]) -> None:
        """Raises ConfigError where that cannot be done."""
        if records:
            replace_file(self._path(tool), msgspec.json.format(msgspec.json.encode(records)) + b"\n")
        else:
            remove_file(self._path(tool))

    def _path(self, tool: str) -> Path:
        return self._folder / f"{tool}.json"
