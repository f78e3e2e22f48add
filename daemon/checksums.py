"""What a source says that a file's bytes come to, and whether they do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PIECE = 1 << 20


@dataclass(frozen=True)
class Checksum:
    """A digest in hexadecimal: SHA-256 of the bytes, or of 40 digits git's of a blob.

    Sources: the hub's LFS records and blob ids; git-hash-object(1): SHA-1 over "blob SIZE\\0" and the bytes.
    """

    digest: str

    @classmethod
    def read(cls, text: object) -> Checksum | None:
        """The checksum in a text, such as an ETag of the hub; None where it is none."""
        plain = text.strip('"').lower() if isinstance(text, str) else ""
        return cls(plain) if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", plain) else None

    def of(self, path: Path, report: Callable[[int], None]) -> Checksum:
        """That of a file, by the same rule. report: told of the bytes read, piece by piece."""
        is_git = len(self.digest) == 40
        state = hashlib.sha1(usedforsecurity=False) if is_git else hashlib.sha256()
        if is_git:
            state.update(b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                state.update(piece)
                report(len(piece))
        return Checksum(state.hexdigest())
