"""Block tables of requests: admit with prefix hits, append, free; and the audit of it all (torch-free).

A block is findable from the moment the step that fills it is planned. That is sound because of the
order within a step: a layer writes the keys and values of the whole batch before its attention reads
any, so a request may share blocks with one that comes before it in the same plan. Requests of equal
prompts that arrive together thus compute their common prefix once. If that step fails, its blocks
are forgotten (`free(..., forget=True)`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quantd.engine.block_pool import HELD, KEPT, BlockPool
from quantd.engine.messages import PoolMap
from quantd.engine.plan import RequestState
from quantd.engine.prefix_cache import PrefixCache, block_key, root_key

_MAX_CELLS = 512


class CacheManager:
    """Owns RequestState.blocks, block_keys and the moves of num_computed that are not a step's."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixCache()
        self.num_evictions = 0

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds but that a prefix can find."""
        return self.pool.num_kept

    def admit(self, state: RequestState, headroom: int) -> bool:
        """Give a request its prefix hits, if all its tokens and `headroom` blocks more would fit now.

        Else change nothing. Only the hits are taken: the other blocks come chunk by chunk.
        """
        hits = self._find_hits(state)
        free_hits = sum(not self.pool.ref_counts[block] for block in hits)
        num_new = self._num_blocks(state.num_tokens) - len(hits)
        if num_new + free_hits + headroom > self.pool.num_free:
            return False
        for block in hits:
            self.pool.share(block)
        state.blocks = hits
        state.num_computed = len(hits) * self.block_size
        return True

    def missing(self, state: RequestState) -> tuple[int, Sequence[bytes]]:
        """Blocks that a hit could cover but that are not here: the number of the first, and their keys."""
        keys = self._hit_keys(state)
        num_found = len(self.prefix.find(keys))
        return num_found, keys[num_found:]

    def adopt(self, state: RequestState, first: int, keys: Sequence[bytes]) -> list[int]:
        """Blocks for the next ones of a request's prompt, from number `first` on, to be filled at once.

        For as many of the leading keys as there are free blocks; none if what they go on from is not here any
        more. They are findable from now on, and held by nobody.
        """
        before = self.prefix.find(state.block_keys[:first])
        if len(before) < first:
            return []
        for block in before:
            self.pool.share(block)
        adopted = [self._allocate() for _ in keys[: self.pool.num_free]]
        for key, block in zip(keys, adopted, strict=False):
            self.prefix.insert(key, block)
        for block in reversed(before + adopted):
            self.pool.release(block, keep=block in self.prefix)
        return adopted

    def append(self, state: RequestState, num_tokens: int) -> bool:
        """Give a request the blocks for its next `num_tokens` tokens; if too few are free, none."""
        end = state.num_computed + num_tokens
        if not self.reserve(state, end):
            return False
        if self.prefix_caching and not _misses_hits(state):
            self._extend_keys(state)
            for index in range(state.num_computed // self.block_size, end // self.block_size):
                self.prefix.insert(state.block_keys[index], state.blocks[index])
        return True

    def reserve(self, state: RequestState, num_tokens: int) -> bool:
        """Give a request the blocks for so many tokens in all, before the last of them is known."""
        num_new = self._num_blocks(num_tokens) - len(state.blocks)
        if num_new > self.pool.num_free:
            return False
        state.blocks.extend(self._allocate() for _ in range(num_new))
        return True

    def free(self, state: RequestState, forget: bool = False) -> None:
        """Take a request's blocks back. They stay findable, unless `forget`: their contents are in doubt.

        Last block first, so that the deep end of a prefix is reused before its root.
        """
        if forget:
            for block in state.blocks:
                self.prefix.evict(block)
        for block in reversed(state.blocks):
            self.pool.release(block, keep=block in self.prefix)
        state.blocks = []
        state.num_computed = 0

    def undo(self, state: RequestState) -> None:
        """Take back the blocks of the last append, whose tokens were not computed after all."""
        for block in state.blocks[state.num_computed // self.block_size :]:
            self.prefix.evict(block)
        while len(state.blocks) > self._num_blocks(state.num_computed):
            self.pool.release(state.blocks.pop(), keep=False)

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Let no later request find these blocks, whoever else shares them; None: any block."""
        blocks = list(self.prefix) if keys is None else [b for key in keys for b in self.prefix.find([key])]
        for block in blocks:
            self.pool.share(block)
            self.prefix.evict(block)
            self.pool.release(block, keep=False)

    def map(self) -> PoolMap:
        """The pool in at most 512 parts, enough for a picture of it."""
        size = -(-self.pool.num_blocks // _MAX_CELLS)
        return PoolMap(
            blocks_per_cell=size, held=self.pool.counts(HELD, size), cached=self.pool.counts(KEPT, size)
        )

    def check(self, states: Iterable[RequestState], num_reserved: int = 0) -> None:
        """Assert, between steps, that the pool adds up over all the requests there are.

        num_reserved: blocks that a request may have, at most, for a step that was started ahead.
        """
        self.pool.check()
        self.prefix.check()
        held: Counter[int] = Counter()
        for state in states:
            held.update(state.blocks)
            assert 0 <= len(state.blocks) - self._num_blocks(state.num_computed) <= num_reserved, state
            for index, block in enumerate(state.blocks):
                assert self.prefix.key_of(block) in (None, *state.block_keys[index : index + 1]), (
                    state,
                    index,
                )
        assert all(count == held[block] for block, count in enumerate(self.pool.ref_counts)), held
        free = [block in self.prefix for block in self.pool.free_blocks()]
        assert free == sorted(free), "an empty block waits behind one worth keeping"
        assert self.num_cached == sum(not self.pool.ref_counts[block] for block in self.prefix)
        assert len(free) - sum(free) + self.num_cached + len(held) == self.pool.num_blocks

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _allocate(self) -> int:
        block = self.pool.allocate()
        self.num_evictions += self.prefix.evict(block)
        return block

    def _find_hits(self, state: RequestState) -> list[int]:
        return self.prefix.find(self._hit_keys(state))

    def _hit_keys(self, state: RequestState) -> Sequence[bytes]:
        """Keys of the request's first tokens, never of all of them: the last is always computed."""
        if not self.prefix_caching or _misses_hits(state):
            return []
        self._extend_keys(state)
        return state.block_keys[: _max_hit_len(state) // self.block_size]

    def _extend_keys(self, state: RequestState) -> None:
        keys = state.block_keys
        for index in range(len(keys), state.num_tokens // self.block_size):
            parent = keys[-1] if keys else root_key(state.request.salt)
            start = index * self.block_size
            keys.append(block_key(parent, state.tokens(start, start + self.block_size)))


def _misses_hits(state: RequestState) -> bool:
    """Whether a request must compute all its tokens itself.

    It leaves no prefix behind either: texts to embed rarely begin alike, and many of them would push out
    what others come back to.
    """
    embedding = state.request.embedding
    return embedding is not None and embedding.needs_whole_prompt


def _max_hit_len(state: RequestState) -> int:
    """Tokens that a hit may cover. Those whose prompt logprobs are still owed must be computed."""
    num_owed = len(state.request.prompt) - 1
    if state.request.sampling.prompt_logprobs is not None and state.num_prompt_logprobs < num_owed:
        return state.num_prompt_logprobs
    return state.num_tokens - 1
