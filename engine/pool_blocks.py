"""The blocks of a pool in the CPU's memory, as bytes (torch-free)."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt


class BlockArray:
    """The PoolBlocks of an array [num_blocks, bytes] (see quantd.engine.plan).

    numerics: what its bits depend on, to which is added what the first block holds, computed already: where
    anything is left out that changes the arithmetic, that is likely to show there.
    """

    def __init__(self, blocks: npt.NDArray[np.uint8], numerics: str) -> None:
        self._blocks = blocks
        self.num_bytes = blocks.shape[1]
        self.numerics = f"{numerics} {blake2b(blocks[0].tobytes()).hexdigest()}"

    def read(self, block: int) -> bytes:
        """See PoolBlocks."""
        copy: bytes = self._blocks[block].tobytes()
        return copy

    def write(self, block: int, data: bytes | memoryview) -> None:
        """See PoolBlocks."""
        self._blocks[block] = np.frombuffer(data, np.uint8)
