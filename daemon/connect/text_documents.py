"""Files in a language of their own: one that is ours as a whole, and marked blocks in one that is the user's.

A path in them is one word; the value is a text.
"""

from __future__ import annotations

import re

from msgspec import UNSET, UnsetType

from quantd.daemon.connect.document import Path
from quantd.daemon.errors import ConfigError

WHOLE: Path = ("whole",)


class OwnFile:
    """A file that holds what is written for the tool and nothing else, at the path WHOLE."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get(self, path: Path) -> str | UnsetType:
        assert path == WHOLE
        return self._text or UNSET

    def set(self, path: Path, value: object) -> None:
        assert path == WHOLE
        self._text = str(value)

    def remove(self, path: Path) -> None:
        assert path == WHOLE
        self._text = ""

    def text(self) -> str:
        return self._text


class ElispBlocks:
    """An Emacs Lisp file with blocks between comments that name them; a new one goes to the end."""

    def __init__(self, text: str) -> None:
        self._text = text
        marks = re.findall(r"^;; (>>>|<<<) quantd connect (\S+)$", text, re.MULTILINE)
        names = [name for _, name in marks[::2]]
        if marks != [pair for name in names for pair in ((">>>", name), ("<<<", name))]:
            raise ConfigError("the lines that mark a block of quantd (;; >>> and ;; <<<) do not pair up")

    def get(self, path: Path) -> str | UnsetType:
        found = self._block(path).search(self._text)
        return found[1] if found else UNSET

    def set(self, path: Path, value: object) -> None:
        self.remove(path)
        start = self._text if not self._text or self._text.endswith("\n") else self._text + "\n"
        self._text = f"{start};; >>> quantd connect {path[0]}\n{value};; <<< quantd connect {path[0]}\n"

    def remove(self, path: Path) -> None:
        self._text = self._block(path).sub("", self._text)

    def text(self) -> str:
        return self._text

    def _block(self, path: Path) -> re.Pattern[str]:
        mark = f"quantd connect {re.escape(str(path[0]))}\n"
        return re.compile(f"^;; >>> {mark}(.*?)^;; <<< {mark}", re.MULTILINE | re.DOTALL)
