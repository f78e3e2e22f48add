"""Blocks of prompts on their way from the disk into the pool, for one request at a time (torch-free).

A thread reads; the step loop puts what has arrived into the pool between two steps, where it is a prefix like
any other. Until then the request waits, and nothing is reserved for it, so it keeps nobody else waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quantd.engine.block_file import Data
from quantd.engine.block_folder import BlockFolder
from quantd.engine.cache_manager import CacheManager
from quantd.engine.disk_thread import DiskThread
from quantd.engine.plan import PoolBlocks, RequestState

MIN_BLOCKS = 4
"""Fewer are computed about as soon as they are read and handed over."""

_PIECE_BYTES = 8 << 20
_PIECES_AHEAD = 4
_LONGEST_SECONDS = 30.0
_LATE_SHARE = 0.3
_FORGIVEN = 0.9

logger = logging.getLogger(__name__)


class Fetch:
    """Blocks that a request waits for: those of its prompt from number `first` on.

    seconds: what reading them may take.
    """

    def __init__(self, state: RequestState, first: int, keys: Sequence[bytes], seconds: float) -> None:
        self.state = state
        self.first = first
        self.keys = keys
        self.seconds = seconds
        self.num_arrived = 0
        self.cancelled = False
        self.ahead = threading.Semaphore(_PIECES_AHEAD)


class Arrived(NamedTuple):
    """The next blocks of a fetch, in order. seconds: what reading them took."""

    fetch: Fetch
    blocks: Sequence[Data]
    seconds: float
    is_last: bool


class Pace:
    """Whether reading a block takes less time than computing it, by what both took of late."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._reading: float | None = None
        self._computing: float | None = None

    def note_read(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were read."""
        if num_blocks:
            self._reading = _mean(self._reading, seconds / num_blocks)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step took so long. Short ones say nothing of prompts."""
        if num_tokens >= MIN_BLOCKS * self._block_size:
            self._computing = _mean(self._computing, self._block_size * seconds / num_tokens)

    def reading_wins(self) -> bool:
        """Whether to read. Each no makes the next one less sure, for a slow disk may have been asleep."""
        if self._reading is None or self._computing is None or self._reading < self._computing:
            return True
        self._reading *= _FORGIVEN
        return False

    def limit(self, num_blocks: int) -> float:
        """Seconds that so many blocks may take: not more than to compute them."""
        if self._computing is None:
            return _LONGEST_SECONDS
        return min(num_blocks * self._computing, _LONGEST_SECONDS)


class BlockReader:
    """put: hands what has arrived to the step loop, from the thread that reads."""

    def __init__(
        self, folder: BlockFolder, pool: PoolBlocks, block_size: int, put: Callable[[Arrived], None]
    ) -> None:
        self.pace = Pace(block_size)
        self.num_read = 0
        self._folder = folder
        self._pool = pool
        self._put = put
        self._thread = DiskThread("disk reader")
        self._fetch: Fetch | None = None
        self._waiting: deque[RequestState] = deque()

    def fetch(self, state: RequestState, cache: CacheManager) -> bool:
        """Whether the request is to wait for what the disk has of its prompt, which is read from now on."""
        if self._fetch is None:
            return self._begin(state, cache)
        keys = cache.missing(state)[1]
        is_coming = bool(keys) and keys[0] in self._fetch.keys
        waits = is_coming or self._folder.count(keys[:MIN_BLOCKS]) == MIN_BLOCKS
        if waits:
            self._waiting.append(state)
        return waits

    def cancel(self, state: RequestState) -> None:
        """The request waits no more."""
        if state in self._waiting:
            self._waiting.remove(state)
        if self._fetch is not None and self._fetch.state is state:
            self._fetch.cancelled = True

    def stop(self) -> None:
        """What has not arrived yet is not taken in."""
        if self._fetch is not None:
            self._fetch.cancelled = True

    def arrived(self, piece: Arrived, cache: CacheManager) -> list[RequestState]:
        """Put blocks into the pool; the requests that need wait no more."""
        fetch = piece.fetch
        fetch.ahead.release()
        self.pace.note_read(len(piece.blocks), piece.seconds)
        if not fetch.cancelled:
            self._take_in(fetch, piece.blocks, cache)
        if not piece.is_last:
            return []
        self._fetch = None
        return [fetch.state, *self._begin_next(cache)]

    def _take_in(self, fetch: Fetch, data: Sequence[Data], cache: CacheManager) -> None:
        start = fetch.num_arrived
        adopted = cache.adopt(fetch.state, fetch.first + start, fetch.keys[start : start + len(data)])
        for block, content in zip(adopted, data, strict=False):
            self._pool.write(block, content)
        fetch.num_arrived += len(adopted)
        self.num_read += len(adopted)
        fetch.cancelled = len(adopted) < len(data)

    def _begin_next(self, cache: CacheManager) -> list[RequestState]:
        """Go on with the next request that waits; those before it for which there is nothing to read."""
        ready = []
        while self._waiting and not self._begin(self._waiting[0], cache):
            ready.append(self._waiting.popleft())
        if self._waiting:
            self._waiting.popleft()
        return ready

    def _begin(self, state: RequestState, cache: CacheManager) -> bool:
        first, keys = cache.missing(state)
        num_blocks = self._folder.count(keys[: max(cache.pool.num_free - first, 0)])
        if num_blocks < MIN_BLOCKS or not self.pace.reading_wins():
            return False
        fetch = self._fetch = Fetch(state, first, keys[:num_blocks], self.pace.limit(num_blocks))
        self._thread.submit(lambda: self._read(fetch))
        return True

    def _read(self, fetch: Fetch) -> None:
        """In the thread. Whatever happens, the last piece comes."""
        blocks: list[Data] = []
        seconds, left = 0.0, fetch.seconds
        try:
            for depth, key in enumerate(fetch.keys, fetch.first + 1):
                begun = time.monotonic()
                data = None if fetch.cancelled or left < 0 else self._folder.read(key)
                if data is None:
                    break
                self._folder.touch(key, depth)
                blocks.append(data)
                took = time.monotonic() - begun
                seconds, left = seconds + took, left - took
                if len(blocks) * len(data) >= _PIECE_BYTES:
                    self._put(Arrived(fetch, blocks, seconds, is_last=False))
                    blocks, seconds = [], 0.0
                    fetch.ahead.acquire()
        except Exception:
            logger.exception("blocks of a prompt cannot be read")
        self._put(Arrived(fetch, blocks, seconds, is_last=True))


def _mean(before: float | None, now: float) -> float:
    """A mean in which what was seen of late counts most."""
    return now if before is None else (1 - _LATE_SHARE) * before + _LATE_SHARE * now
