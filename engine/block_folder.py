"""The blocks of one kind on disk, a file each, named by its key (torch-free).

Any number of processes may use a folder at once: files appear whole, by a rename, and equal names mean equal
contents. A file's time of change is when it was last used, earlier by a microsecond for each block before
it, so that by age alone the deep end of a prefix goes before its root. A file that its owner may not write
is pinned. Nothing is forced to the disk: what a loss of power leaves is told by the checksum.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from quantd.engine.block_file import HEADER_BYTES, BlockFileError, BlockHeader, Data, decode, encode_header

ABOUT = "about.json"
PARTIAL = ".partial-"
PINNED, UNPINNED = 0o400, 0o600

_NAME = re.compile(r"[0-9a-f]{64}")
# By this backups leave the folder out (bford.info/cachedir).
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n"
_DEPTH_NS = 1000
# A use is noted no more often than this: each note is a write of its own to the disk.
_USE_NS = 60_000_000_000

logger = logging.getLogger(__name__)


class About(msgspec.Struct, frozen=True):
    """What people are told of the blocks in a folder, by a file in it; nothing depends on that."""

    model_path: str
    kv_dtype: str
    block_size: int


class BlockFolder:
    """Blocks of `block_bytes` bytes. Makes the folder, for its owner alone, or raises OSError."""

    def __init__(self, root: Path, kind: bytes, block_bytes: int, about: About) -> None:
        self.kind = kind
        self.block_bytes = block_bytes
        self.path = root / kind.hex()[:32]
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (root / "CACHEDIR.TAG").write_text(_TAG)
        self.path.mkdir(exist_ok=True, mode=0o700)
        (self.path / ABOUT).write_bytes(msgspec.json.encode(about))

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of the leading blocks are here."""
        return next((index for index, key in enumerate(keys) if self._find(key) is None), len(keys))

    def read(self, key: bytes) -> memoryview | None:
        """A block's data; None where it is not here, or no longer what was written, which ends the file."""
        path = self._path(key)
        try:
            return decode(path.read_bytes(), self.kind, key)
        except FileNotFoundError:
            return None
        except (OSError, BlockFileError) as error:
            self._drop(path, str(error))
            return None

    def write(self, key: bytes, parent: bytes, depth: int, data: Data) -> None:
        """Keep a block. Raises OSError, and leaves nothing behind then."""
        header = encode_header(BlockHeader(self.kind, key, parent, depth, len(data)), data)
        # For nobody but the owner (mkstemp(3)).
        with tempfile.NamedTemporaryFile(prefix=PARTIAL, dir=self.path, delete=False) as file:
            partial = Path(file.name)
            try:
                file.write(header)
                file.write(data)
                file.close()
                os.utime(partial, ns=_times(depth))
                partial.replace(self._path(key))
            except OSError:
                partial.unlink()
                raise

    def touch(self, key: bytes, depth: int) -> bool:
        """Note that a block is used now. False where it is not here."""
        found = self._find(key)
        if found is None:
            return False
        times = _times(depth)
        if abs(times[1] - found.st_mtime_ns) >= _USE_NS:
            try:
                os.utime(self._path(key), ns=times)
            except OSError:
                return False
        return True

    def remove(self, key: bytes) -> None:
        """Delete a block, if it is here."""
        if self._find(key) is not None:
            self._unlink(self._path(key))

    def _path(self, key: bytes) -> Path:
        return self.path / key.hex()

    def _find(self, key: bytes) -> os.stat_result | None:
        path = self._path(key)
        try:
            found = path.lstat()
        except OSError:
            return None
        if stat.S_ISREG(found.st_mode) and found.st_size == HEADER_BYTES + self.block_bytes:
            return found
        self._drop(path, f"it has {found.st_size} bytes, not {HEADER_BYTES + self.block_bytes}")
        return None

    def _drop(self, path: Path, reason: str) -> None:
        logger.warning("%s is dropped: %s", path, reason)
        self._unlink(path)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s stays: %s", path, error.strerror)


def block_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The files of a folder that are named as blocks are."""
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if _NAME.fullmatch(entry.name))


def _times(depth: int) -> tuple[int, int]:
    used = time.time_ns() - depth * _DEPTH_NS
    return used, used
