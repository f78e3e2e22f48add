"""The blocks of a pool in the CPU's memory, as bytes (torch-free)."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt


class BlockArray:
    """The PoolBlocks of an array [num_blocks, bytes] (see quantd.engine.plan). numerics: see fingerprint."""

    def __init__(self, blocks: npt.NDArray[np.uint8], numerics: str) -> None:
        self._blocks = blocks
        self.num_bytes = blocks.shape[1]
        self.numerics = fingerprint(numerics, self.read(0))

    def read(self, block: int) -> bytes:
        """See PoolBlocks."""
        copy: bytes = self._blocks[block].tobytes()
        return copy

    def write(self, block: int, data: bytes | memoryview) -> None:
        """See PoolBlocks."""
        self._blocks[block] = np.frombuffer(data, np.uint8)


def fingerprint(numerics: str, first: bytes) -> str:
    """What a pool's bits depend on, and what its first block holds, computed already.

    Where anything is left out that changes the arithmetic, that is likely to show there.
    """
    return f"{numerics} {blake2b(first).hexdigest()}"
