"""Blocks on their way from the pool to the disk, while the engine has nothing else to do (torch-free).

A thread writes, one block at a time, of a copy: a request that comes meanwhile finds the engine free.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple

from quantd.engine.block_file import HEADER_BYTES
from quantd.engine.block_folder import BlockFolder
from quantd.engine.cache_manager import CacheManager
from quantd.engine.disk_space import DiskSpace
from quantd.engine.disk_thread import DiskThread
from quantd.engine.plan import PoolBlocks

_LOOKS_A_TURN = 64

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Chain:
    """The blocks of a prefix in order: their keys, that before the first, and how many are dealt with."""

    root: bytes
    keys: Sequence[bytes]
    num_done: int = 0


class Written(NamedTuple):
    """A block is written; or why it is not, and none will be."""

    error: str | None


class _Block(NamedTuple):
    key: bytes
    parent: bytes
    depth: int
    data: bytes


class BlockWriter:
    """put: tells the step loop that a block is written, from the thread that writes.

    chains: what is to be on the disk, the latest last.
    """

    def __init__(
        self,
        folder: BlockFolder,
        space: DiskSpace,
        pool: PoolBlocks,
        chains: deque[Chain],
        put: Callable[[Written], None],
    ) -> None:
        self._folder = folder
        self._space = space
        self._pool = pool
        self._chains = chains
        self._put = put
        self._thread = DiskThread("disk writer")
        self._writing: Event | None = None
        self._stopped = False

    def turn(self, cache: CacheManager) -> bool:
        """Begin to write a block, or look at some that may be there; whether to go on at once."""
        if self._writing is not None:
            return False
        for _ in range(_LOOKS_A_TURN):
            if self._stopped or not self._chains:
                return False
            block = self._next(cache)
            if block is not None:
                self._begin(block)
                return False
        return True

    def written(self, error: str | None) -> None:
        """A block that was begun is written, or is not."""
        self._writing = None
        self._note(error)

    def flush(self, cache: CacheManager, seconds: float) -> None:
        """Write what is to be written, for so long at most; this waits."""
        deadline = time.monotonic() + seconds
        self._finish(seconds)
        while self._chains and not self._stopped and time.monotonic() < deadline:
            block = self._next(cache)
            if block is not None:
                self._note(self._write(block))

    def forget(self, keys: Collection[bytes] | None) -> None:
        """Delete these blocks and write no prefix with them; None: write nothing of what is known so far."""
        self._finish(None)
        if keys is None:
            self._chains.clear()
            return
        gone = set(keys)
        for chain in [chain for chain in self._chains if not gone.isdisjoint(chain.keys)]:
            self._chains.remove(chain)
        for key in gone:
            self._folder.remove(key)

    def _next(self, cache: CacheManager) -> _Block | None:
        """Deal with the next block of the latest prefix; the block, if it must be written."""
        chain = self._chains[-1]
        index, key = chain.num_done, chain.keys[chain.num_done]
        is_there = self._folder.touch(key, index + 1)
        found = [] if is_there else cache.prefix.find([key])
        chain.num_done += 1
        # Behind one that is lost the others are of no use.
        if chain.num_done == len(chain.keys) or not (is_there or found):
            self._chains.pop()
        if not found:
            return None
        parent = chain.keys[index - 1] if index else chain.root
        return _Block(key, parent, index + 1, self._pool.read(found[0]))

    def _begin(self, block: _Block) -> None:
        self._writing = self._thread.submit(lambda: self._put(Written(self._write(block))))

    def _write(self, block: _Block) -> str | None:
        """Why the block cannot be written, if so."""
        try:
            if not self._space.make_room(HEADER_BYTES + len(block.data)):
                return "what is pinned leaves no room"
            self._folder.write(*block)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _note(self, error: str | None) -> None:
        if error is not None and not self._stopped:
            self._stopped = True
            self._chains.clear()
            logger.warning("no more prefixes are written to %s: %s", self._folder.path, error)

    def _finish(self, seconds: float | None) -> None:
        """Wait for the block that is being written."""
        if self._writing is not None:
            self._writing.wait(seconds)
