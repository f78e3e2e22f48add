"""What GPUs the kernels are for, by compute capability: 89 for sm_89."""

from __future__ import annotations

# Bytes of shared memory that one program may have (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    120: 99 << 10,
}
TARGETS = tuple(SHARED_MEMORY)
FIRST_DOT = 80
"""Lowest compute capability with tensor-core products from Triton."""
