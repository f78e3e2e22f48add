"""Memory in huge pages: through pages of 4 KiB a good part of the read bandwidth goes into page walks."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, of a cache line
_CHUNK_BYTES = 32 << 20


def map_pages(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zero, committed only as it is written. Raises OSError where that is refused.

    Anonymous and private; in huge pages where the system has them (madvise(2), MADV_HUGEPAGE).
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Arena:
    """Gives out pieces of large mappings. A mapping goes when the last tensor in it does."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], on a cache line of its own."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._free):
            self._free = map_pages(max(size, _CHUNK_BYTES))
        taken, self._free = self._free[:num_bytes], self._free[size:]
        return taken
