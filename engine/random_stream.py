"""Each request's own random numbers: a pure function of (seed, position), torch-free.

Nothing is consumed, so a draw is the same whatever else runs and however often it is repeated.
"""

from __future__ import annotations

import hashlib
import struct

_BITS = 52  # u * total then stays below total for every float64 total


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the draw at `position` of the stream `seed` (both int64), by BLAKE2b."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS)
