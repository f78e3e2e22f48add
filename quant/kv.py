"""KV cache formats and the block pool's memory: what a block holds, byte by byte.

A block holds `block_size` tokens of all layers as one contiguous object, so sharing, copying, swapping
or writing it to disk moves one piece of memory. Knows nothing of requests or of who owns a block.

One block, each part aligned to 64 bytes:

    layer 0: | K codes [kv_heads, block_size, D] | K scales [kv_heads, block_size] | V codes | V scales |
    layer 1: ...

Formats without scales leave those parts out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quantd.kernels.huge_pages import map_pages
from quantd.kernels.ops import KVLayer

ALIGNMENT = 64
_SCALE_DTYPE = torch.float32
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class KVFormat:
    """How a key or value is kept. scaled: one float32 scale per token and head, value = code * scale."""

    name: str
    dtype: torch.dtype
    scaled: bool = False


FORMATS = {
    format.name: format
    for format in (
        KVFormat("int8", torch.int8, scaled=True),
        KVFormat("fp16", torch.float16),
        KVFormat("bf16", torch.bfloat16),
        KVFormat("fp32", torch.float32),
    )
}


@dataclass(frozen=True)
class KVShape:
    """What a block must hold: block_size tokens of num_layers layers with num_kv_heads heads of head_dim."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def codes(self) -> tuple[int, int, int]:
        """Shape of one layer's keys (or values) in a block."""
        return self.num_kv_heads, self.block_size, self.head_dim

    @property
    def scales(self) -> tuple[int, int]:
        """Shape of one layer's key (or value) scales in a block."""
        return self.num_kv_heads, self.block_size


def block_bytes(format: KVFormat, shape: KVShape) -> int:
    """Bytes of one block, alignment included."""
    return shape.num_layers * 2 * _half_bytes(format, shape)


def _half_bytes(format: KVFormat, shape: KVShape) -> int:
    """Bytes of one layer's keys with their scales, or of its values with theirs."""
    codes = _aligned_bytes(shape.codes, format.dtype)
    return codes + (_aligned_bytes(shape.scales, _SCALE_DTYPE) if format.scaled else 0)


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KVPool:
    """The block pool's memory. data: uint8 [num_blocks, block_bytes], all zero at first."""

    format: KVFormat
    shape: KVShape
    data: Tensor

    @classmethod
    def allocate(
        cls, format: KVFormat, shape: KVShape, num_blocks: int, device: torch.device = _CPU
    ) -> KVPool:
        """Reserve num_blocks blocks. A CPU's memory is committed page by page as blocks are written.

        Raises OSError where the system refuses even the reservation, RuntimeError where a GPU does.
        """
        size = block_bytes(format, shape)
        if device.type != "cpu":
            return cls(format, shape, torch.zeros(num_blocks, size, dtype=torch.uint8, device=device))
        return cls(format, shape, map_pages(num_blocks * size).view(num_blocks, size))

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def layers(self) -> list[KVLayer]:
        """Each layer's part of every block, as views."""
        half = _half_bytes(self.format, self.shape)
        return [self._layer(2 * i * half, (2 * i + 1) * half) for i in range(self.shape.num_layers)]

    def _layer(self, key_offset: int, value_offset: int) -> KVLayer:
        k, k_scale = self._half(key_offset)
        v, v_scale = self._half(value_offset)
        return KVLayer(k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def _half(self, offset: int) -> tuple[Tensor, Tensor | None]:
        codes = self._view(offset, self.shape.codes, self.format.dtype)
        if not self.format.scaled:
            return codes, None
        offset += _aligned_bytes(self.shape.codes, self.format.dtype)
        return codes, self._view(offset, self.shape.scales, _SCALE_DTYPE)

    def _view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """[num_blocks, *shape] of `dtype`, `offset` bytes into each block."""
        typed = self.data.view(dtype)
        inner = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return typed.as_strided((self.num_blocks, *shape), (typed.shape[1], *inner), offset // dtype.itemsize)
