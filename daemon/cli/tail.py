"""The end of a file that others write, and what they add to it, over its rotation.

A file that grew too large is moved to PATH.1 and begun anew, or cut to nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

_LOOK_SECONDS = 0.25
_PIECE = 1 << 16


def last_lines(path: Path, count: int) -> list[str]:
    """At most so many of the latest whole lines, some of them maybe from the file that came before."""
    with path.open("rb") as file:
        return _last_lines(file, path, count)


def follow(path: Path, count: int) -> Iterator[str]:
    """The last `count` lines, then each that is added, for ever. A file not there yet is waited for."""
    with ExitStack() as opened:
        file = _opened(path, opened)
        if file is not None:
            yield from _last_lines(file, path, count)
        while True:
            if file is not None:
                yield from _new_lines(file)
            if not _is_other(file, path):
                time.sleep(_LOOK_SECONDS)
                continue
            if file is not None:
                yield from _new_lines(file)  # written between the last look and the rotation
            opened.close()
            file = _opened(path, opened)


def _opened(path: Path, opened: ExitStack) -> BinaryIO | None:
    """The file, until `opened` is closed; None where there is none."""
    try:
        return opened.enter_context(path.open("rb"))
    except FileNotFoundError:
        return None


def _last_lines(file: BinaryIO, path: Path, count: int) -> list[str]:
    """The file is left behind its last whole line."""
    lines = _take_last(file, count)
    before = path.with_name(f"{path.name}.1")
    if len(lines) < count and before.exists():
        with before.open("rb") as older:
            lines = _take_last(older, count - len(lines)) + lines
    return lines


def _take_last(file: BinaryIO, count: int) -> list[str]:
    data, start = b"", file.seek(0, os.SEEK_END)
    while start and data.count(b"\n") <= count:
        size = min(_PIECE, start)
        start -= size
        file.seek(start)
        data = file.read(size) + data
    end = data.rfind(b"\n") + 1
    file.seek(start + end)
    whole = data[:end].splitlines()
    return [line.decode(errors="replace") for line in whole[max(len(whole) - count, 0) :]]


def _new_lines(file: BinaryIO) -> Iterator[str]:
    if os.fstat(file.fileno()).st_size < file.tell():
        file.seek(0)
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line[:-1].decode(errors="replace")


def _is_other(file: BinaryIO | None, path: Path) -> bool:
    """Whether the path leads to another file by now."""
    try:
        present = path.stat()
    except FileNotFoundError:
        return file is not None and os.fstat(file.fileno()).st_nlink == 0
    return file is None or not os.path.samestat(present, os.fstat(file.fileno()))
