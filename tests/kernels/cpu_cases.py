"""Inputs for tests of the CPU kernels, and one run over every op on odd shapes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor

from quantd.kernels.cpu import load_ops
from quantd.kernels.cpu.build import Variant
from quantd.kernels.cpu.ops import CpuOps
from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer, Ops, QKNorm, RopeTable
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight
from quantd.quant.kv import FORMATS, KVPool, KVShape

# Each with a path of its own; "native" is whatever this CPU has.
VARIANTS: list[Variant] = ["native", "portable"]
if platform.machine() == "x86_64":
    VARIANTS.append("avx2")


@cache
def cpu_ops(
    activations: Literal["auto", "fp32"] = "auto", variant: Variant = "native", threads: int = 2
) -> CpuOps:
    """Ops of a path; skips the test where this machine cannot build it."""
    ops = load_ops(activations, threads, variant)
    if ops is None:
        pytest.skip(f"no {variant} kernels on this machine")
    return ops


def randint(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8)


def quantized(
    n: int, k: int, bits: int, group_size: int, scales: str = "half", perm: bool = False
) -> QuantizedWeight:
    """scales: "half" and "float" have offsets of their own, "half zero" and "float zero" zero points."""
    groups = -(-k // group_size)
    scale = torch.rand(n, groups) * 0.1 + 0.01
    offset = torch.randn(n, groups) * 0.1
    if scales.startswith("half"):
        scale, offset = scale.half().float(), offset.half().float()
    if scales.endswith("zero"):
        offset = -randint(2**bits, n, groups).float() * scale
    order = torch.randperm(k) if perm else None
    return QuantizedWeight(randint(2**bits, n, k), scale, offset, bits, group_size, order)


def round_inputs(x: Tensor) -> Tensor:
    """x [M, K] as INT8 with a scale for every 32 inputs: what quantized weights are multiplied with."""
    m, k = x.shape
    blocks = torch.nn.functional.pad(x, (0, -k % 32)).view(m, -1, 32)
    absmax = blocks.abs().amax(2, keepdim=True)
    codes = torch.where(absmax > 0, blocks * (127 / absmax), 0).round()
    return (codes.double() * (absmax / 127).double()).view(m, -1)[:, :k].float()


@dataclass(frozen=True)
class Pool:
    """Requests in a pool of scattered blocks. lengths: tokens of each. blocks: their tables."""

    lengths: Sequence[int]
    block_size: int
    blocks: Tensor

    @classmethod
    def scattered(cls, lengths: Sequence[int], block_size: int) -> Pool:
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts), dtype=torch.int32) + 1
        blocks = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, ids in zip(blocks, order.split(counts), strict=True):
            row[: len(ids)] = ids
        return cls(lengths, block_size, blocks)

    def inputs(self, spans: Sequence[tuple[int, int, int]]) -> AttentionInputs:
        """spans: (request, first position, one behind the last) of each request in the step."""
        requests = torch.tensor([r for r, _, _ in spans])
        positions = torch.cat([torch.arange(first, last) for _, first, last in spans])
        owners = torch.cat([torch.full((last - first,), r) for r, first, last in spans])
        slots = (
            self.blocks[owners, positions // self.block_size] * self.block_size + positions % self.block_size
        )
        counts = torch.tensor([0, *(last - first for _, first, last in spans)])
        return AttentionInputs(
            positions=positions.int(),
            slots=slots.int(),
            query_start=counts.cumsum(0).int(),
            context_len=torch.tensor([last for _, _, last in spans]).int(),
            block_tables=self.blocks[requests].contiguous(),
        )

    def whole(self) -> AttentionInputs:
        """All tokens of all requests."""
        return self.inputs([(r, 0, length) for r, length in enumerate(self.lengths)])

    def layer(self, name: str, heads: HeadShape) -> KVLayer:
        """A layer of a fresh pool, the second of two. What was never written is NaN."""
        shape = KVShape(2, heads.num_kv_heads, heads.head_dim, self.block_size)
        pool = KVPool.allocate(FORMATS[name], shape, int(self.blocks.max()) + 2)
        pool.data.fill_(0xFF)  # NaN as every float type, and as a scale
        return pool.layers()[1]


def rope_table(rotary_dim: int, length: int = 1200) -> RopeTable:
    angles = torch.arange(length)[:, None] * torch.rand(rotary_dim // 2)
    return RopeTable(angles.cos(), angles.sin())


HEADS = HeadShape(9, 3, 64)
ODD_HEADS = HeadShape(4, 2, 20)


def every_op(ops: Ops) -> dict[str, Tensor]:
    """The results of each op on odd shapes; the same inputs every time."""
    torch.manual_seed(7)
    results = _weights(ops) | _rows(ops)
    for format in FORMATS:
        results |= _attention(ops, format, HEADS, 16, [300, 37, 1], window=0, softcap=0.0)
        results |= _attention(ops, format, ODD_HEADS, 4, [50, 9], window=11, softcap=5.0)
    return results


def _weights(ops: Ops) -> dict[str, Tensor]:
    results = {}
    weights: dict[str, Weight] = {
        f"{bits} bits, {group} {scales}": quantized(37, 75, bits, group, scales, perm=group == 75)
        for bits, group, scales in [
            (2, 32, "half"),
            (3, 75, "half zero"),
            (4, 32, "half"),
            (4, 64, "float zero"),
            (5, 16, "float"),
            (8, 16, "half zero"),
            (8, 32, "float"),
            (4, 7, "half"),
        ]
    }
    weights |= {
        str(t): DenseWeight(torch.randn(33, 70).to(t)) for t in (torch.half, torch.bfloat16, torch.float)
    }
    for name, weight in weights.items():
        x, packed = torch.randn(133, weight.shape[1]), ops.pack(weight, torch.randn(weight.shape[0]))
        for m in (1, 2, 7, 133):
            results[f"linear {name}, {m}"] = ops.linear(x[:m], packed)
        results[f"logits {name}"] = ops.logits(x[:3], packed, 0.5, 3.0)
        results[f"embedding {name}"] = ops.embedding(torch.tensor([3, 32, 0]).int(), packed, 1.5)
    return results


def _rows(ops: Ops) -> dict[str, Tensor]:
    x, residual, weight = torch.randn(9, 75) * 3, torch.randn(9, 75), torch.rand(75)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5, 0.3)
    return {
        "rms_norm": ops.rms_norm(x, weight, 1e-5),
        "add_rms_norm": normed,
        "sum": total,
        "silu": ops.glu(torch.randn(5, 2 * 1030) * 20, "silu"),
        "gelu_tanh": ops.glu(torch.randn(5, 2 * 33) * 20, "gelu_tanh"),
        "concat": ops.concat([x, residual[:, :20], x[:, 5:10]]),
    }


def _attention(
    ops: Ops, format: str, heads: HeadShape, block_size: int, lengths: list[int], window: int, softcap: float
) -> dict[str, Tensor]:
    pool, dim = Pool.scattered(lengths, block_size), heads.head_dim
    inputs, layer = pool.whole(), pool.layer(format, heads)
    qkv = torch.randn(sum(lengths), (heads.num_heads + 2 * heads.num_kv_heads) * dim)
    norm = QKNorm(torch.rand(dim), torch.rand(dim), 1e-6)
    q = ops.rope_kv_write(qkv, heads, inputs, layer, rope_table(dim // 4 * 2), norm)
    name = f"{format} {dim}"
    written = inputs.slots.long() // block_size, slice(None), inputs.slots.long() % block_size
    results = {f"q {name}": q, f"k {name}": layer.k[written].float(), f"v {name}": layer.v[written].float()}
    if layer.k_scale is not None:
        results[f"k_scale {name}"] = layer.k_scale[written]
    results[f"attention {name}"] = ops.attention(q, heads, inputs, layer, 0.2, window, softcap)
    return results
