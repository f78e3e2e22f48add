"""How much room the blocks on disk may take, over all kinds, and which of them go for others (torch-free)."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from quantd.engine.block_folder import PARTIAL, block_files

USUAL_BYTES = 10 * 10**9
MAX_AGE_SECONDS = 30 * 86400.0

_DISK_SHARE = 4
# Two processes may write at a time: each makes room for two sixteenths of the bound, writes one, looks again.
_LOOK_SHARE, _ROOM_SHARE = 16, 8
_PARTIAL_SECONDS = 3600.0
_KIND = re.compile(r"[0-9a-f]{32}")


class _File(NamedTuple):
    used_ns: int
    num_bytes: int
    path: str
    pinned: bool


class DiskSpace:
    """The room of all blocks below `root`: a folder for each kind.

    limit: bytes; None for 10 GB, or a quarter of what the disk has for them if that is less. clock: seconds
    since the epoch. For one thread at a time.
    """

    def __init__(self, root: Path, limit: int | None, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._limit = limit
        self._clock = clock
        self._room = 0

    def make_room(self, num_bytes: int) -> bool:
        """Whether a file of so many bytes may be written.

        Now and then this looks through all files and deletes those that were used least recently, or not for
        30 days, but never a pinned one. Raises OSError.
        """
        if self._room < num_bytes:
            self._room = self._look(num_bytes)
        if self._room < num_bytes:
            return False
        self._room -= num_bytes
        return True

    def _look(self, num_bytes: int) -> int:
        """Bytes that may be written before the next look."""
        files = sorted(self._files())
        total = sum(file.num_bytes for file in files)
        limit = self._bound(total)
        target = limit - max(limit // _ROOM_SHARE, num_bytes)
        oldest_ns = int((self._clock() - MAX_AGE_SECONDS) * 1e9)
        for file in files:
            if not file.pinned and (file.used_ns < oldest_ns or total > target):
                Path(file.path).unlink(missing_ok=True)
                total -= file.num_bytes
        return min(limit - total, max(limit // _LOOK_SHARE, num_bytes))

    def _bound(self, total: int) -> int:
        if self._limit is not None:
            return self._limit
        return min(USUAL_BYTES, (total + shutil.disk_usage(self._root).free) // _DISK_SHARE)

    def _files(self) -> Iterator[_File]:
        for folder in kind_folders(self._root):
            self._clear_partials(folder)
            for entry in block_files(folder):
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                pinned = not found.st_mode & 0o200
                yield _File(found.st_mtime_ns, found.st_size, entry.path, pinned)

    def _clear_partials(self, folder: Path) -> None:
        """Delete what processes left that ended in the middle of a write."""
        for partial in folder.glob(PARTIAL + "*"):
            try:
                if self._clock() - partial.stat().st_mtime > _PARTIAL_SECONDS:
                    partial.unlink()
            except FileNotFoundError:
                continue


def kind_folders(root: Path) -> list[Path]:
    """The folders of blocks, one a kind; none where there is no `root` yet."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return sorted(
            Path(entry)
            for entry in entries
            if _KIND.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )
