"""The frames between the daemon and the process that tries grammars; see quantd.engine.connection."""

from __future__ import annotations

import msgspec


class CheckGrammar(msgspec.Struct, frozen=True):
    """Can this grammar be used with the model in this folder?"""

    grammar: str
    folder: str
    vocab_size: int


class Checked(msgspec.Struct, frozen=True):
    """refusal: why not; None: it can."""

    refusal: str | None = None
