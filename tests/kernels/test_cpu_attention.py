"""Norms, rotation and paged attention of the CPU kernels against the reference, and in any company."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cpu_cases import HEADS, ODD_HEADS, Pool, cpu_ops, rope_table
from torch import Tensor

from quantd.kernels.ops import HeadShape, KVLayer, Ops, QKNorm
from quantd.kernels.reference import ReferenceOps, quantize_int8

FORMATS = ["fp32", "fp16", "bf16", "int8"]
REFERENCE = ReferenceOps()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def width(heads: HeadShape) -> int:
    return (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim


@pytest.mark.parametrize("size", [1, 15, 16, 75, 576])
def test_norms(size: int) -> None:
    ops, x, residual, weight = cpu_ops(), torch.randn(9, size) * 3, torch.randn(9, size), torch.rand(size)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    for actual, expected in zip(
        ops.add_rms_norm(x, residual, weight, 1e-5, 0.22),
        REFERENCE.add_rms_norm(x, residual, weight, 1e-5, 0.22),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("size", [1, 33, 1030])
def test_gated_activations(size: int) -> None:
    gate_up = torch.randn(3, 2 * size) * 10
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    for activation in ("silu", "gelu_tanh"):
        torch.testing.assert_close(
            cpu_ops().glu(gate_up, activation), REFERENCE.glu(gate_up, activation), atol=1e-6, rtol=2e-6
        )


def test_concat() -> None:
    parts = [torch.randn(3, n) for n in (5, 1, 40)]
    assert torch.equal(cpu_ops().concat(parts), torch.cat(parts, 1))


def stored(layer: KVLayer, slots: Tensor) -> list[Tensor]:
    block, offset = slots.long() // layer.k.shape[2], slots.long() % layer.k.shape[2]
    tensors = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    return [t[block, :, offset] for t in tensors if t is not None]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("heads", "rotary_dim", "norm"),
    [(HEADS, 64, False), (ODD_HEADS, 8, True), (HeadShape(8, 1, 80), 0, False)],
)
def test_rope_rotates_and_writes(format: str, heads: HeadShape, rotary_dim: int, norm: bool) -> None:
    pool = Pool.scattered([37, 5], 4)
    inputs, qkv = pool.whole(), torch.randn(42, width(heads))
    rope = rope_table(rotary_dim) if rotary_dim else None
    qk_norm = QKNorm(torch.rand(heads.head_dim), torch.rand(heads.head_dim), 1e-6) if norm else None
    layers, queries = [pool.layer(format, heads) for _ in range(2)], []
    for ops, layer in zip((cpu_ops(), REFERENCE), layers, strict=True):
        queries.append(ops.rope_kv_write(qkv, heads, inputs, layer, rope, qk_norm))
    torch.testing.assert_close(queries[0], queries[1], atol=2e-6, rtol=2e-6)
    # A tie of rounding may fall either way, by one step of the format.
    step = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 1.0}[format]
    for actual, expected in zip(*(stored(layer, inputs.slots) for layer in layers), strict=True):
        difference = (actual.float() - expected.float()).abs()
        assert difference.max() <= step
        assert (difference > 2e-6).float().mean() < 0.01


def test_only_the_slots_of_the_step_are_written() -> None:
    pool = Pool.scattered([20], 4)
    layer = pool.layer("int8", HEADS)
    before = [t.clone() for t in (layer.k, layer.v)]
    cpu_ops().rope_kv_write(torch.randn(3, width(HEADS)), HEADS, pool.inputs([(0, 7, 10)]), layer, None)
    changed = [int((t != old).any(3).any(1).sum()) for t, old in zip((layer.k, layer.v), before, strict=True)]
    assert changed == [3, 3]


def test_int8_zero_and_broken_vectors() -> None:
    pool, heads = Pool.scattered([3], 4), HeadShape(1, 1, 20)
    layer, qkv = pool.layer("int8", heads), torch.zeros(3, 60)
    qkv[1, 25] = torch.nan
    qkv[2, 25] = torch.inf
    cpu_ops().rope_kv_write(qkv, heads, pool.whole(), layer, None)
    codes, _, scales, _ = stored(layer, pool.whole().slots)
    assert not codes.any()
    assert scales[0] == 0
    assert scales[1:].isnan().all()


def filled(ops: Ops, pool: Pool, format: str, heads: HeadShape) -> tuple[KVLayer, Tensor]:
    """A layer with every request's keys and values, and all queries."""
    layer = pool.layer(format, heads)
    qkv = torch.randn(sum(pool.lengths), width(heads))
    return layer, ops.rope_kv_write(qkv, heads, pool.whole(), layer, None)


CASES = [
    (HEADS, 16, [1, 300, 37, 515], 0, 0.0),
    (HEADS, 16, [600, 20], 100, 0.0),
    (HEADS, 32, [270], 256, 0.0),
    (ODD_HEADS, 4, [50, 9], 11, 5.0),
    (HeadShape(8, 1, 80), 16, [290], 0, 30.0),
    (HeadShape(3, 3, 128), 8, [70, 3], 1, 0.0),
    (HeadShape(40, 1, 18), 5, [33], 0, 0.0),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("heads", "block_size", "lengths", "window", "softcap"), CASES)
def test_attention(
    format: str, heads: HeadShape, block_size: int, lengths: list[int], window: int, softcap: float
) -> None:
    pool = Pool.scattered(lengths, block_size)
    ops = cpu_ops("fp32")
    layer, q = filled(ops, pool, format, heads)
    expected = REFERENCE.attention(q, heads, pool.whole(), layer, 0.2, window, softcap)
    actual = ops.attention(q, heads, pool.whole(), layer, 0.2, window, softcap)
    torch.testing.assert_close(actual, expected, atol=3e-6, rtol=3e-6)
    if format == "int8":
        codes, scale = quantize_int8(q.view(len(q), -1, heads.head_dim))
        rounded = (codes * scale).flatten(1)
        expected = REFERENCE.attention(rounded, heads, pool.whole(), layer, 0.2, window, softcap)
        actual = cpu_ops("auto").attention(q, heads, pool.whole(), layer, 0.2, window, softcap)
        torch.testing.assert_close(actual, expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("heads", "block_size", "lengths", "window", "softcap"), CASES)
def test_chunks_and_company_change_no_bit(
    format: str, heads: HeadShape, block_size: int, lengths: list[int], window: int, softcap: float
) -> None:
    pool, ops = Pool.scattered(lengths, block_size), cpu_ops("auto")
    layer, q = filled(ops, pool, format, heads)
    whole = ops.attention(q, heads, pool.whole(), layer, 0.2, window, softcap)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for chunk in (1, 7, 100):
        for r, (start, stop) in enumerate(pairwise(starts)):
            for first in {0, (stop - start) // 2, max(stop - start - chunk, 0)}:
                last = min(first + chunk, stop - start)
                rows = slice(start + first, start + last)
                inputs = pool.inputs([(r, first, last)])
                part = ops.attention(q[rows].contiguous(), heads, inputs, layer, 0.2, window, softcap)
                assert torch.equal(part, whole[rows]), (chunk, r, first)


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_threads_change_no_bit(threads: int) -> None:
    """Few threads walk a row's splits in turn, many take one each."""
    pool = Pool.scattered([1030], 16)
    layer, q = filled(cpu_ops(), pool, "int8", HEADS)
    last = pool.inputs([(0, 1029, 1030)])
    expected = cpu_ops().attention(q[-1:], HEADS, last, layer, 0.2)
    assert torch.equal(cpu_ops(threads=threads).attention(q[-1:], HEADS, last, layer, 0.2), expected)
    whole = cpu_ops(threads=threads).attention(q, HEADS, pool.whole(), layer, 0.2)
    assert torch.equal(whole[-1:], expected)
