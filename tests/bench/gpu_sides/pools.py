"""Block pools, and steps over them whose requests lie scattered, as in a pool that has been used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer
from quantd.quant.kv import FORMATS, KVPool, KVShape, block_bytes

BLOCK_SIZE = 16


def pool_bytes(format: str, heads: HeadShape, num_layers: int, num_tokens: int) -> int:
    """Of a pool that holds so many tokens."""
    return _blocks(num_tokens) * block_bytes(FORMATS[format], _shape(heads, num_layers))


def new_pool(format: str, heads: HeadShape, num_layers: int, num_tokens: int, device: torch.device) -> KVPool:
    """A pool for so many tokens, with random keys and values."""
    shape = _shape(heads, num_layers)
    size = block_bytes(FORMATS[format], shape)
    data = torch.zeros(_blocks(num_tokens), size, dtype=torch.uint8, device=device)
    pool = KVPool(FORMATS[format], shape, data)
    for layer in pool.layers():
        _fill(layer)
    return pool


def step(
    spans: Sequence[tuple[int, int]], device: torch.device, max_len: int | None = None
) -> AttentionInputs:
    """A request for each (first, last) position in the step; tables have room for max_len tokens."""
    num_blocks = _blocks(max_len or max(last for _, last in spans))
    tables = torch.randperm(len(spans) * num_blocks, dtype=torch.int32).view(len(spans), num_blocks)
    positions = torch.cat([torch.arange(first, last) for first, last in spans])
    lengths = torch.tensor([last - first for first, last in spans])
    owners = torch.arange(len(spans)).repeat_interleave(lengths)
    slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    context_len = torch.tensor([last for _, last in spans])
    tensors = (positions, slots, starts, context_len, tables)
    return AttentionInputs(*(tensor.to(device, torch.int32) for tensor in tensors))


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _shape(heads: HeadShape, num_layers: int) -> KVShape:
    return KVShape(num_layers, heads.num_kv_heads, heads.head_dim, BLOCK_SIZE)


def _fill(layer: KVLayer) -> None:
    for values, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
        if scale is None:
            values.normal_()
        else:
            values.random_(-127, 128)
            scale.fill_(0.02)
