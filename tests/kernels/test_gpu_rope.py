"""Norm, rotation and KV write of the Triton kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_cases import Pool, rope_table
from gpu_pool import new_layer, step_inputs, to_device
from torch import Tensor

from quantd.kernels.gpu.rope import rope_kv_write
from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer, QKNorm, RopeTable
from quantd.kernels.reference import ReferenceOps

# What a value may be off by: queries in their type, keys and values in the pool's, one step at a tie.
STEP = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}
PAGE_STEP = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 8e-3, "int8": 1.0}


@pytest.fixture(autouse=True)
def seed(poisoned_outputs: None) -> None:
    torch.manual_seed(0)


def random_qkv(num_tokens: int, heads: HeadShape, device: str) -> Tensor:
    return torch.randn(num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim).to(device)


def table(rotary_dim: int, device: str) -> RopeTable | None:
    if not rotary_dim:
        return None
    rope = rope_table(rotary_dim)
    return RopeTable(rope.cos.to(device), rope.sin.to(device))


def norm(heads: HeadShape, device: str) -> QKNorm:
    q_weight, k_weight = torch.rand(2, heads.head_dim).to(device)
    return QKNorm(q_weight, k_weight, 1e-6)


def stored(layer: KVLayer, slots: Tensor) -> list[Tensor]:
    block, offset = slots.long() // layer.k.shape[2], slots.long() % layer.k.shape[2]
    tensors = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    return [t[block, :, offset].float() for t in tensors if t is not None]


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("int8", torch.float16),
        ("fp32", torch.float32),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("int8", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("heads", "rotary_dim", "has_norm"),
    [
        (HeadShape(9, 3, 64), 64, False),
        (HeadShape(4, 2, 20), 8, True),
        (HeadShape(8, 1, 80), 0, False),
        (HeadShape(1, 1, 96), 96, True),
    ],
)
def test_rope_rotates_and_writes(
    format: str, dtype: torch.dtype, heads: HeadShape, rotary_dim: int, has_norm: bool, gpu_device: str
) -> None:
    pool = Pool.scattered([7, 3], 4)
    inputs, qkv = to_device(pool.whole(), gpu_device), random_qkv(10, heads, gpu_device).to(dtype)
    rope, qk_norm = table(rotary_dim, gpu_device), norm(heads, gpu_device) if has_norm else None
    layer, expected_layer = (new_layer(pool, format, heads, gpu_device) for _ in range(2))
    expected = ReferenceOps().rope_kv_write(qkv.float(), heads, inputs, expected_layer, rope, qk_norm)
    q = rope_kv_write(qkv, heads, inputs, layer, rope, qk_norm)
    assert q.dtype == dtype
    torch.testing.assert_close(q.float(), expected, atol=STEP[dtype], rtol=STEP[dtype])
    for actual, wanted in zip(stored(layer, inputs.slots), stored(expected_layer, inputs.slots), strict=True):
        torch.testing.assert_close(actual, wanted, atol=PAGE_STEP[format], rtol=PAGE_STEP[format] % 1)
        if format != "bf16":
            assert ((actual - wanted).abs() > 2e-6).float().mean() < 0.01
        assert not actual.isnan().any()


def test_only_the_slots_of_the_step_are_written(gpu_device: str) -> None:
    heads, pool = HeadShape(2, 1, 20), Pool.scattered([20], 4)
    inputs = step_inputs(pool, [(0, 7, 10)], gpu_device)
    inputs = replace(inputs, slots=inputs.slots.where(inputs.positions != 8, -1))
    layer = new_layer(pool, "int8", heads, gpu_device)
    before = [t.clone() for t in (layer.k, layer.v)]
    rope_kv_write(random_qkv(3, heads, gpu_device), heads, inputs, layer, None)
    for pages, old in zip((layer.k, layer.v), before, strict=True):
        assert (pages != old).any(3).any(1).sum() == 2
        block, offset = inputs.slots[[0, 2]] // 4, inputs.slots[[0, 2]] % 4
        assert (pages != old).any(3)[block, 0, offset].all()


def test_int8_zero_and_broken_vectors(gpu_device: str) -> None:
    heads, pool = HeadShape(1, 1, 20), Pool.scattered([4], 4)
    inputs, layer = to_device(pool.whole(), gpu_device), new_layer(pool, "int8", heads, gpu_device)
    qkv = torch.zeros(4, 60)
    qkv[1, 25], qkv[2, 25], qkv[3, 39] = torch.nan, torch.inf, -torch.inf
    qkv[1:, 26] = 1.0
    rope_kv_write(qkv.to(gpu_device), heads, inputs, layer, None)
    k, v, k_scale, v_scale = stored(layer, inputs.slots)
    assert not k.any() and not v.any() and not v_scale.any()
    assert k_scale[0] == 0
    assert k_scale[1:].isnan().all()


def test_company_changes_no_bit(gpu_device: str) -> None:
    heads, pool = HeadShape(3, 1, 20), Pool.scattered([5, 4], 4)
    rope, qk_norm = table(12, gpu_device), norm(HeadShape(3, 1, 20), gpu_device)
    qkv = random_qkv(9, heads, gpu_device).half()

    def run(qkv: Tensor, inputs: AttentionInputs) -> list[Tensor]:
        layer = new_layer(pool, "int8", heads, gpu_device)
        q = rope_kv_write(qkv, heads, inputs, layer, rope, qk_norm)
        return [q, *stored(layer, inputs.slots)]

    whole = run(qkv, to_device(pool.whole(), gpu_device))
    alone = run(qkv[7:8].contiguous(), step_inputs(pool, [(1, 2, 3)], gpu_device))
    for one, all_of_them in zip(alone, whole, strict=True):
        assert torch.equal(one[0], all_of_them[7])
