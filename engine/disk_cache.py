"""The prefix cache's part on disk, which outlives the engine: what the step loop and the scheduler ask of it.

What is on disk is as good as what is in the pool, bit for bit. So a block's kind is a digest of all that its
bits depend on beside its tokens and salt: the weights, and how this engine computes and stores. Torch-free.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from hashlib import blake2b
from pathlib import Path
from threading import Event
from typing import NamedTuple, Protocol, TypeAlias

from quantd.engine.block_file import DIGEST_BYTES, VERSION
from quantd.engine.block_folder import About, BlockFolder
from quantd.engine.cache_manager import CacheManager
from quantd.engine.config import EngineConfig
from quantd.engine.disk_reader import MIN_BLOCKS, Arrived, BlockReader
from quantd.engine.disk_space import DiskSpace
from quantd.engine.disk_thread import DiskThread
from quantd.engine.disk_writer import BlockWriter, Chain, Written
from quantd.engine.plan import PoolBlocks, RequestState, Runner
from quantd.engine.prefix_cache import root_key
from quantd.engine.weights_digest import WeightDigests

DIGESTS = "weights"

_MAX_CHAINS = 256

logger = logging.getLogger(__name__)


class WeightsRead(NamedTuple):
    """The digest of the model's weights is known from now on; or why it is not."""

    error: str | None


FromDisk: TypeAlias = Arrived | Written | WeightsRead


class DiskCache(Protocol):
    """Blocks on disk, as an engine uses them."""

    @property
    def num_read(self) -> int:
        """Blocks that were read back."""

    def fetch(self, state: RequestState, cache: CacheManager) -> bool:
        """Whether a request that comes must wait until `heard` gives it back: blocks of it are being read."""

    def end(self, state: RequestState, keep: bool) -> None:
        """A request ends. keep: what it leaves in the prefix cache is to be kept on disk."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so long."""

    def turn(self, cache: CacheManager) -> bool:
        """Do a part, a millisecond or so, of what is to be written, while nothing else is to be done.

        False: nothing is left, or not before the next `heard`.
        """

    def heard(self, message: FromDisk, cache: CacheManager) -> list[RequestState]:
        """Take in what a thread has done; requests that need wait no more."""

    def forget(self, keys: Collection[bytes] | None) -> None:
        """Delete blocks that the pool has forgotten.

        None: all that are not written yet; those that are stay.
        """

    def flush(self, cache: CacheManager, seconds: float) -> None:
        """Write what is to be written, for so long at most; this waits."""


class _NoDisk:
    """Nothing is kept on disk."""

    num_read = 0

    def fetch(self, state: RequestState, cache: CacheManager) -> bool:
        return False

    def end(self, state: RequestState, keep: bool) -> None:
        pass

    def note_step(self, num_tokens: int, seconds: float) -> None:
        pass

    def turn(self, cache: CacheManager) -> bool:
        return False

    def heard(self, message: FromDisk, cache: CacheManager) -> list[RequestState]:
        raise AssertionError(f"nobody asked for {message}")

    def forget(self, keys: Collection[bytes] | None) -> None:
        pass

    def flush(self, cache: CacheManager, seconds: float) -> None:
        pass


NO_DISK = _NoDisk()


class BlocksOnDisk:
    """The DiskCache of a runner whose pool can be read. Idle until it knows whose weights these are.

    put: hands the step loop what threads have done.
    """

    def __init__(
        self, config: EngineConfig, root: Path, pool: PoolBlocks, put: Callable[[FromDisk], None]
    ) -> None:
        self._config = config
        self._root = root
        self._pool = pool
        self._put = put
        self._chains: deque[Chain] = deque(maxlen=_MAX_CHAINS)
        self._digests = WeightDigests(root / DIGESTS)
        self._weights = self._digests.identity(Path(config.model_path))
        self._weights_read: Event | None = None
        self._reader: BlockReader | None = None
        self._writer: BlockWriter | None = None
        self._open_if_known()

    @property
    def num_read(self) -> int:
        """See DiskCache."""
        return 0 if self._reader is None else self._reader.num_read

    def fetch(self, state: RequestState, cache: CacheManager) -> bool:
        """See DiskCache."""
        return self._reader is not None and self._reader.fetch(state, cache)

    def end(self, state: RequestState, keep: bool) -> None:
        """See DiskCache."""
        if self._reader is not None:
            self._reader.cancel(state)
        keys = state.block_keys[: state.num_computed // self._config.block_size]
        if keep and state.request.comes_back and len(keys) >= MIN_BLOCKS:
            self._chains.append(Chain(root_key(state.request.salt), keys))

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """See DiskCache."""
        if self._reader is not None:
            self._reader.pace.note_computed(num_tokens, seconds)

    def turn(self, cache: CacheManager) -> bool:
        """See DiskCache."""
        if self._writer is not None:
            return self._writer.turn(cache)
        if self._chains:
            self._begin_weights()
        return False

    def heard(self, message: FromDisk, cache: CacheManager) -> list[RequestState]:
        """See DiskCache."""
        match message:
            case Arrived():
                assert self._reader is not None
                return self._reader.arrived(message, cache)
            case Written(error):
                assert self._writer is not None
                self._writer.written(error)
            case WeightsRead(error):
                if error is not None:
                    self._give_up(error)
                elif self._writer is None:
                    self._open_if_known()
        return []

    def forget(self, keys: Collection[bytes] | None) -> None:
        """See DiskCache."""
        if self._reader is not None:
            self._reader.stop()
        if self._writer is not None:
            self._writer.forget(keys)
        else:
            self._chains.clear()

    def flush(self, cache: CacheManager, seconds: float) -> None:
        """See DiskCache."""
        if self._writer is None and self._chains:
            begun = time.monotonic()
            self._begin_weights().wait(seconds)
            seconds -= time.monotonic() - begun
            self._open_if_known()
        if self._writer is not None:
            self._writer.flush(cache, seconds)

    def _begin_weights(self) -> Event:
        if self._weights_read is None:
            self._weights_read = DiskThread("weights").submit(self._read_weights)
        return self._weights_read

    def _read_weights(self) -> None:
        try:
            self._digests.compute(Path(self._config.model_path))
            self._put(WeightsRead(None))
        except OSError as error:
            self._put(WeightsRead(str(error)))

    def _open_if_known(self) -> None:
        model = Path(self._config.model_path)
        known = self._digests.known(model)
        if self._digests.identity(model) != self._weights:
            self._give_up("the model's files have changed since it was loaded")
        elif known is not None:
            self._open(known)

    def _give_up(self, reason: str) -> None:
        logger.warning("no prefixes are kept on disk: %s", reason)
        self._chains = deque(maxlen=0)

    def _open(self, weights: bytes) -> None:
        kind = kind_of(weights, self._pool.numerics)
        about = About(self._config.model_path, self._config.kv_dtype, self._config.block_size)
        try:
            folder = BlockFolder(self._root, kind, self._pool.num_bytes, about)
        except OSError as error:
            self._give_up(str(error))
            return
        space = DiskSpace(self._root, self._config.disk_cache)
        self._reader = BlockReader(folder, self._pool, self._config.block_size, self._put)
        self._writer = BlockWriter(folder, space, self._pool, self._chains, self._put)


def kind_of(weights: bytes, numerics: str) -> bytes:
    """The kind of blocks that an engine computes. weights: their digest; numerics: see PoolBlocks."""
    version = importlib.metadata.version("quantd")
    return blake2b(
        f"{VERSION} {version} {weights.hex()} {numerics}".encode(), digest_size=DIGEST_BYTES
    ).digest()


def open_disk_cache(config: EngineConfig, runner: Runner, put: Callable[[FromDisk], None]) -> DiskCache:
    """What the configuration asks for, as far as the runner can have it; a line in the log says where not."""
    if config.prefix_folder is None or not config.prefix_caching or config.disk_cache == 0:
        return NO_DISK
    if runner.pool_blocks is None:
        logger.info("no prefixes are kept on disk: that needs a model in one rank")
        return NO_DISK
    try:
        return BlocksOnDisk(config, Path(config.prefix_folder), runner.pool_blocks, put)
    except OSError as error:
        logger.warning("no prefixes are kept on disk: %s", error)
        return NO_DISK
