"""The blocks of a pool in a GPU's memory, as bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quantd.engine.pool_blocks import fingerprint
from quantd.kernels.gpu.kv_cache import gather_blocks, scatter_blocks


class GpuBlocks:
    """The PoolBlocks of a pool uint8 [num_blocks, bytes] (see quantd.engine.plan).

    numerics: as that of a BlockArray. What is written lies before all that is started afterwards.
    """

    def __init__(self, pool: Tensor, numerics: str) -> None:
        self._pool = pool
        self._on_gpu = pool.device.type == "cuda"
        self.num_bytes = pool.shape[1]
        self.numerics = fingerprint(numerics, self.read(0))

    def read(self, block: int) -> bytes:
        """See PoolBlocks. Waits for what has been started."""
        host = self._host()
        gather_blocks(self._pool, [block], host)
        if self._on_gpu:
            torch.cuda.current_stream(self._pool.device).synchronize()
        copy: bytes = host.numpy().tobytes()
        return copy

    def write(self, block: int, data: bytes | memoryview) -> None:
        """See PoolBlocks. Waits for nothing: torch gives pinned memory out again when a copy is through."""
        host = self._host()
        host.numpy()[0] = np.frombuffer(data, np.uint8)
        scatter_blocks(self._pool, [block], host)

    def _host(self) -> Tensor:
        return torch.empty(1, self.num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
