"""Files of the user's, read and replaced as a whole, never left half written."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from quantd.daemon.errors import ConfigError


def read_file(path: Path) -> bytes | None:
    """What a file holds; None where there is none. Raises ConfigError."""
    with _told_of(path, "read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def missing_folders(path: Path) -> list[Path]:
    """The folders that have to be made for a file, innermost first.

    Raises ConfigError where the file, or the first folder, may not be written.
    """
    with _told_of(path, "written"):
        target = path.resolve()
        missing = [folder for folder in target.parents if not folder.exists()]
        start = missing[-1].parent if missing else target.parent
        for place in (target, start):
            if place.exists() and not os.access(place, os.W_OK):
                raise ConfigError(f"{path}: cannot be written: {place} is read-only for you")
        return missing


def replace_file(path: Path, data: bytes) -> None:
    """Put a new file in the place of one, or where there is none, with the folders that it takes.

    Its owner and mode stay, and a link to it stays a link. Raises ConfigError.
    """
    with _told_of(path, "written"):
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.quantd-{os.getpid()}")
        try:
            _write_through(fresh, data, target.stat() if target.exists() else None)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)


def remove_file(path: Path, folders: Iterable[Path] = ()) -> None:
    """Delete a file, and those of the folders, innermost first, that are left empty. Raises ConfigError."""
    with _told_of(path, "removed"):
        path.resolve().unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _write_through(path: Path, data: bytes, like: os.stat_result | None) -> None:
    """A new file, which keys may be in, is its owner's alone."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        if like is not None:
            if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _told_of(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be {done}: {error.strerror}") from None
