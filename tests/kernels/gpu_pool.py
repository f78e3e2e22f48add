"""Pools of keys and values for tests of the Triton kernels, where those run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from cpu_cases import Pool
from torch import Tensor

from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer
from quantd.kernels.reference import ReferenceOps
from quantd.quant.kv import FORMATS, KVPool, KVShape, block_bytes

Span = tuple[int, int, int]  # request, its first position in the step, one behind the last


def new_layer(pool: Pool, format: str, heads: HeadShape, device: str) -> KVLayer:
    """The second of two layers of a pool in which everything is NaN."""
    shape = KVShape(2, heads.num_kv_heads, heads.head_dim, pool.block_size)
    size = int(pool.blocks.max()) + 2, block_bytes(FORMATS[format], shape)
    data = torch.full(size, 0xFF, dtype=torch.uint8, device=device)
    return KVPool(FORMATS[format], shape, data).layers()[1]


def step_inputs(pool: Pool, spans: Sequence[Span], device: str) -> AttentionInputs:
    return to_device(pool.inputs(spans), device)


def to_device(inputs: AttentionInputs, device: str) -> AttentionInputs:
    return AttentionInputs(*(getattr(inputs, field.name).to(device) for field in fields(inputs)))


def filled_layer(pool: Pool, format: str, heads: HeadShape, device: str) -> tuple[KVLayer, list[Tensor]]:
    """A layer with the keys and values of all tokens, and the queries of each request, float32."""
    layer = new_layer(pool, format, heads, device)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(sum(pool.lengths), width).to(device)
    q = ReferenceOps().rope_kv_write(qkv, heads, to_device(pool.whole(), device), layer, None)
    return layer, list(q.split(list(pool.lengths)))


def take(rows: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """The rows of a step, from those of each request."""
    return torch.cat([rows[r][first:last] for r, first, last in spans])
