"""Pools of keys and values for tests of the Triton kernels, where those run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from cpu_cases import Pool
from torch import Tensor
from triton.runtime import interpreter

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


def order_dots(patch: pytest.MonkeyPatch) -> None:
    """Give the interpreter dots whose rows know nothing of one another, as those of tensor cores.

    Its own leave the order of adding to a library, which takes it from a row's place among the others;
    and they take the bits of a bfloat16 for a number.
    """

    def dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> Any:
        exact = _numbers(a) @ _numbers(b) + d.data
        return interpreter.TensorHandle(exact.astype(d.data.dtype), d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _numbers(handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)
