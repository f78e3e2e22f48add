"""llama-server's slots, which a shared pool of blocks does not have: only the prompts that clients gave them.

A slot is a name for the latest prompt of a client. Saved is what was its prompt, in tokens; restored means
computed again, after which the prefix cache holds it. Keys and values themselves are not written.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quantd.engine.errors import RequestError

_MOST_FILES = 1000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class SavedPrompt(msgspec.Struct, frozen=True):
    """A file's content. model: whose tokens these are."""

    model: str
    tokens: list[int]


@dataclass(frozen=True)
class SlotFile:
    """A prompt and the size in bytes of the file that holds it."""

    prompt: SavedPrompt
    size: int


class Slots:
    """The latest prompt of each slot, by model, and files of such prompts in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prompts: dict[tuple[str, int], Sequence[int]] = {}

    def note(self, model: str, slot: int, prompt: Sequence[int]) -> None:
        """The slot's prompt is this one now."""
        self._prompts[model, slot] = prompt

    def prompt(self, model: str, slot: int) -> Sequence[int]:
        """The slot's prompt; empty if it has none."""
        return self._prompts.get((model, slot), ())

    def erase(self, model: str, slot: int) -> Sequence[int]:
        """Forget the slot's prompt; what it was."""
        return self._prompts.pop((model, slot), ())

    def save(self, model: str, slot: int, filename: str | None) -> SlotFile:
        """Write the slot's prompt to a file. Raises RequestError for a bad name and an empty slot."""
        path = self._path(filename)
        tokens = list(self.prompt(model, slot))
        if not tokens:
            raise RequestError(f"slot {slot} of {model} has no prompt to save yet", "id_slot")
        saved = SavedPrompt(model, tokens)
        data = msgspec.msgpack.encode(saved)
        self._make_room(path)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        partial.write_bytes(data)
        partial.replace(path)
        return SlotFile(saved, len(data))

    def load(self, filename: str | None) -> SlotFile:
        """Read a file. Raises RequestError for one that is not there or not ours."""
        path = self._path(filename)
        try:
            data = path.read_bytes()
            return SlotFile(msgspec.msgpack.decode(data, type=SavedPrompt), len(data))
        except OSError as error:
            raise RequestError(
                f"filename: {filename} cannot be read: {error.strerror}", "filename"
            ) from error
        except msgspec.MsgspecError as error:
            raise RequestError(f"filename: {filename} is no saved slot: {error}", "filename") from error

    def _make_room(self, path: Path) -> None:
        """Make the folder, for nobody else to look into. Raises RequestError where it has many files."""
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists() and sum(1 for _ in self._folder.iterdir()) >= _MOST_FILES:
            raise RequestError(f"filename: there are {_MOST_FILES} files already; save over one", "filename")

    def _path(self, filename: str | None) -> Path:
        if filename is None or not _NAME.fullmatch(filename):
            raise RequestError(
                "filename must be a plain name of letters, digits, '.', '_' and '-', such as chat.bin",
                "filename",
            )
        return self._folder / filename
