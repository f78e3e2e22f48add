"""The disk that files arrive on: whether they fit, and how much has come."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantd.daemon.errors import DiskFullError
from quantd.daemon.sources.source import Progress

_WATCH_SECONDS = 0.2


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise DiskFullError unless so many bytes fit on the folder's disk."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskFullError(f"{num_bytes / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free there")


def is_full(error: BaseException) -> bool:
    """Whether an error tells of a full disk, quota or limit of a file."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def watched(folder: Path, stage: str, total: int | None, progress: Progress) -> Iterator[None]:
    """While the body runs, report how much lies in `folder`: it works for any program that writes there."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_SECONDS):
            progress(stage, folder_bytes(folder), total)

    progress(stage, 0, total)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    progress(stage, folder_bytes(folder), total)


def folder_bytes(folder: Path) -> int:
    """What lies in a folder and those below it."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118
            except FileNotFoundError:
                continue  # renamed or removed meanwhile
    return total
