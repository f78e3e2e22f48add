"""Blocks by id: reference counts, and the free list that is also the LRU (torch-free).

Knows nothing of tokens, requests or prefixes. The free list is doubly linked through two lists of
ids, so taking the front, adding at either end and unlinking from the middle are O(1). What each block
is at present stands in a bytearray, which is counted at memory speed however large the pool.
"""

from __future__ import annotations

from collections.abc import Iterator

EMPTY, KEPT, HELD = range(3)
"""A block has nothing to keep; it is free but worth keeping; someone holds it."""


class BlockPool:
    """`num_blocks` blocks. The front of the free list is what is reused next. num_touched: ever used."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_touched = 0
        self.ref_counts = [0] * num_blocks
        self._states = bytearray(num_blocks)
        # Index num_blocks is the list's end marker: its next is the front, its previous the back.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def allocate(self) -> int:
        """Take the block at the front of the free list, with a count of one."""
        assert self.num_free, "allocate from an empty pool"
        block = self._next[self.num_blocks]
        self.share(block)
        # Fresh blocks lie in order behind those reused first and before those reused last.
        self.num_touched = max(self.num_touched, block + 1)
        return block

    def share(self, block: int) -> None:
        """Count one more holder of a block, be it held or free."""
        if not self.ref_counts[block]:
            self._unlink(block)
            self._states[block] = HELD
        self.ref_counts[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """Count one holder less. At none, the block is free: reused last if `keep`, else first."""
        assert self.ref_counts[block] > 0, f"block {block} is released more often than held"
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            end = self.num_blocks
            self._link(block, after=self._previous[end] if keep else end)
            self._states[block] = KEPT if keep else EMPTY

    @property
    def num_kept(self) -> int:
        """Free blocks that are worth keeping."""
        return self._states.count(KEPT)

    def counts(self, state: int, size: int) -> list[int]:
        """How many are in this state among the first `size` blocks, the next `size`, and so on."""
        return [self._states.count(state, start, start + size) for start in range(0, self.num_blocks, size)]

    def free_blocks(self) -> Iterator[int]:
        """Free blocks, next to be reused first."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def check(self) -> None:
        """Assert that the free list holds each block without a holder once, in both directions."""
        free = list(self.free_blocks())
        assert len(free) == self.num_free, (len(free), self.num_free)
        assert sorted(free) == [block for block, count in enumerate(self.ref_counts) if not count]
        assert all(self._previous[self._next[block]] == block for block in [self.num_blocks, *free])
        assert free == [block for block in free if self._states[block] != HELD]
        assert self._states.count(HELD) == self.num_blocks - self.num_free

    def _link(self, block: int, after: int) -> None:
        before = self._next[after]
        self._next[after] = self._previous[before] = block
        self._previous[block], self._next[block] = after, before
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        previous, following = self._previous[block], self._next[block]
        self._next[previous], self._previous[following] = following, previous
        self.num_free -= 1
