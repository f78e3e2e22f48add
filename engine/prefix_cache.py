"""The prefix cache: chained block keys and the map from a key to the block that holds it (torch-free).

A key stands for all tokens from the start of the prompt to the end of one full block, and for the
salt. Which blocks are held, free or reused is not known here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 32


def root_key(salt: str) -> bytes:
    """The parent of a prompt's first block: requests of unlike salts share no key."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block after `parent`: BLAKE2b over the parent and the ids, 8 bytes each.

    The width keeps ids apart whatever the vocabulary, and 256 bits put a collision, which would
    show one client's context to another, out of reach.
    """
    return blake2b(parent + struct.pack(f"<{len(token_ids)}q", *token_ids), digest_size=KEY_BYTES).digest()


def block_keys(token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """The keys of the full blocks of a prompt."""
    keys = [root_key(salt)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        keys.append(block_key(keys[-1], token_ids[start : start + block_size]))
    return keys[1:]


class PrefixCache:
    """key <-> block, one block a key. Of blocks with equal contents the first is the findable one."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __iter__(self) -> Iterator[int]:
        """The findable blocks."""
        return iter(self._keys)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the leading keys that are known, up to the first that is not."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, key: bytes, block: int) -> None:
        """Make a block findable, unless another with equal contents is."""
        assert block not in self._keys, f"block {block} holds a prefix already"
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def evict(self, block: int) -> bool:
        """Make a block unfindable. False if it was so already."""
        key = self._keys.pop(block, None)
        if key is None:
            return False
        del self._blocks[key]
        return True

    def key_of(self, block: int) -> bytes | None:
        """The key that a block is found by, if any."""
        return self._keys.get(block)

    def check(self) -> None:
        """Assert that the two maps are each other's inverse."""
        assert self._blocks == {key: block for block, key in self._keys.items()}
