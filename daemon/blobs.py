"""Files that clients send before they make a model of them, by their digests (Ollama's /api/blobs)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import time
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path

from quantd.daemon.errors import DiskFullError
from quantd.daemon.sources.disk import is_full
from quantd.engine.errors import RequestError

_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_PIECE = 1 << 20
_UNUSED_SECONDS = 24 * 3600.0


class Blobs:
    """The blobs in a folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Where the blob with this digest lies, or will lie. Raises RequestError for what is no digest."""
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise RequestError(
                f"{digest[:100]!r} is not a digest: use sha256: and 64 hexadecimal digits", "digest"
            )
        return self.folder / f"sha256-{match[1]}"

    async def receive(self, digest: str, data: AsyncIterable[bytes]) -> None:
        """Keep the data under its digest.

        Raises RequestError, and keeps nothing, where that is another's; DiskFullError for a full disk.
        """
        path = self.path(digest)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prune(_UNUSED_SECONDS)
        partial = self.folder / f".partial-{path.name}-{os.urandom(4).hex()}"
        try:
            found = await _write(partial, data)
            if found != path.name.removeprefix("sha256-"):
                raise RequestError(f"digest mismatch: expected {digest}, got sha256:{found}", "digest")
            partial.rename(path)
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskFullError(f"{digest}: the disk is full ({error.strerror}); make room first") from error
        finally:
            partial.unlink(missing_ok=True)

    def prune(self, age: float = 0.0) -> None:
        """Delete what no model is made of, if it is so many seconds old."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                is_whole = not path.name.startswith(".partial-")
                if status.st_nlink == 1 and time.time() - status.st_mtime > max(age, 0 if is_whole else 3600):
                    path.unlink()


async def _write(path: Path, data: AsyncIterable[bytes]) -> str:
    """Write the data to a new file; its sha256. Disk and digest are left to a thread."""
    digest = hashlib.sha256()
    with path.open("xb") as file:

        def add(piece: bytes) -> None:
            digest.update(piece)
            file.write(piece)

        async for piece in _pieces(data):
            await asyncio.to_thread(add, piece)
    return digest.hexdigest()


async def _pieces(data: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data in larger pieces."""
    held = bytearray()
    async for chunk in data:
        held += chunk
        if len(held) >= _PIECE:
            yield bytes(held)
            held.clear()
    yield bytes(held)
