"""What a model that was made from another brings to every request: preset.json in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quantd.daemon.templates import Message
from quantd.quant.errors import CheckpointError

PRESET_NAME = "preset.json"


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts where a request leaves a matter open; a model has one of its own, which may be empty.

    system: for conversations that do not begin with a system message. messages: stand before each
    conversation. sampling: fields of SamplingParams. context_len, max_tokens: of a request, in tokens.
    license: a text for people.
    """

    system: str = ""
    messages: list[dict[str, Any]] = []
    sampling: dict[str, int | float] = {}
    stop: list[str] = []
    context_len: int | None = None
    max_tokens: int | None = None
    license: str = ""

    @classmethod
    def read(cls, folder: Path) -> Preset:
        """The preset of a model folder. Raises CheckpointError for a file that is none."""
        file = folder / PRESET_NAME
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error

    def write(self, folder: Path) -> None:
        """Make it the preset of a model folder, in place of the one there."""
        file = folder / PRESET_NAME
        file.unlink(missing_ok=True)  # it may be another model's too
        if self != Preset():
            file.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    def over(self, other: Preset) -> Preset:
        """This preset with the other's fields where it has none."""
        own = msgspec.structs.asdict(self)
        fields = {name: value or getattr(other, name) for name, value in own.items()}
        return Preset(**fields | {"sampling": other.sampling | self.sampling})

    def conversation(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages of a request behind those of the model."""
        messages = [*self.messages, *messages]
        if self.system and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages
