"""The reference ops against float64 formulas written the long way."""

from __future__ import annotations

import math

import pytest
import torch

from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer, Ops, QKNorm, RopeTable
from quantd.kernels.reference import ReferenceOps, quantize_int8
from quantd.kernels.weights import DenseWeight, QuantizedWeight

OPS: Ops = ReferenceOps()


def random_weight(
    n: int, k: int, bits: int, group: int, perm: bool = False, input_bits: int | None = None
) -> QuantizedWeight:
    groups = -(-k // group)
    return QuantizedWeight(
        torch.randint(0, 2**bits, (n, k), dtype=torch.uint8),
        torch.rand(n, groups) + 0.1,
        torch.randn(n, groups),
        bits,
        group,
        torch.randperm(k) if perm else None,
        input_bits,
    )


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("perm", [False, True])
def test_linear_and_embedding_equal_the_dequantized_weight(bits: int, perm: bool) -> None:
    weight, bias = random_weight(13, 45, bits, 16, perm), torch.randn(13)
    packed, x = OPS.pack(weight, bias), torch.randn(3, 45)
    torch.testing.assert_close(OPS.linear(x, packed), x @ weight.dequantize().T + bias, rtol=1e-5, atol=1e-4)
    ids = torch.tensor([12, 0, 12], dtype=torch.int32)
    torch.testing.assert_close(OPS.embedding(ids, packed, 2.0), 2 * weight.dequantize()[ids])
    assert packed.shape == (13, 45)


def test_small_codes_stay_packed_in_memory() -> None:
    sizes = {bits: OPS.pack(random_weight(64, 128, bits, 128)).nbytes - 2 * 64 * 4 for bits in (2, 3, 4, 8)}
    assert sizes == {2: 64 * 32, 3: 64 * 128, 4: 64 * 64, 8: 64 * 128}
    assert OPS.pack(DenseWeight(torch.zeros(8, 8, dtype=torch.bfloat16))).nbytes == 8 * 8 * 2


def test_wide_outputs_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = OPS.pack(DenseWeight(torch.randn(50, 8)), torch.randn(50)), torch.randn(2, 8)
    whole = OPS.linear(x, packed)
    monkeypatch.setattr("quantd.kernels.reference._CHUNK_ELEMENTS", 7 * 8)
    assert torch.equal(OPS.linear(x, packed), whole)


def test_inputs_are_rounded_to_int8_only_where_asked() -> None:
    x = torch.randn(4, 32)
    weight = random_weight(8, 32, 8, 32, input_bits=8)
    scale = x.abs().amax(1, True) / 127.5
    rounded = (x / scale).round().clamp(-128, 127) * scale
    exact = x @ weight.dequantize().T
    torch.testing.assert_close(
        OPS.linear(x, OPS.pack(weight)), rounded @ weight.dequantize().T, rtol=1e-5, atol=1e-3
    )
    unrounded = ReferenceOps("fp32")
    torch.testing.assert_close(unrounded.linear(x, unrounded.pack(weight)), exact, rtol=1e-5, atol=1e-3)
    assert (rounded @ weight.dequantize().T - exact).abs().max() > 0.1


def test_int8_rounds_half_to_even_and_keeps_zero() -> None:
    codes, scale = quantize_int8(torch.tensor([[127.0, 2.5, -3.5, 0.5], [0.0, 0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[127, 2, -4, 0], [0, 0, 0, 0]]
    assert scale.tolist() == [[1.0], [0.0]]


def test_logits_scale_and_softcap() -> None:
    packed, x = OPS.pack(DenseWeight(torch.randn(7, 5))), torch.randn(2, 5)
    expected = 3 * torch.tanh(0.5 * OPS.linear(x, packed) / 3)
    torch.testing.assert_close(OPS.logits(x, packed, 0.5, 3.0), expected)


def test_norms() -> None:
    x, residual, weight = torch.randn(3, 9), torch.randn(3, 9), torch.randn(9)
    total = residual + 0.25 * x
    expected = total / (total.square().mean(-1, True) + 1e-3).sqrt() * weight
    normed, out = OPS.add_rms_norm(x, residual, weight, 1e-3, 0.25)
    torch.testing.assert_close(out, total)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(OPS.rms_norm(total, weight, 1e-3), expected)


def test_glu() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    both = torch.cat([gate, up], 1)
    torch.testing.assert_close(OPS.glu(both, "silu"), gate / (1 + torch.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(OPS.glu(both, "gelu_tanh"), 0.5 * gate * (1 + torch.tanh(inner)) * up)


HEADS = HeadShape(4, 2, 6)
BLOCK = 4


def make_layer(int8: bool) -> KVLayer:
    shape = (9, HEADS.num_kv_heads, BLOCK, HEADS.head_dim)
    if not int8:
        return KVLayer(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    codes = torch.full(shape, 99, dtype=torch.int8)
    scales = torch.full(shape[:3], torch.nan)
    return KVLayer(codes, codes.clone(), scales, scales.clone())


def make_inputs() -> AttentionInputs:
    """Request 0 computes tokens 3..6, request 1 its token 0, request 2 tokens 0..8; blocks out of order."""
    chunks = [(3, 7, [5, 2, 0]), (0, 1, [1, 0, 0]), (0, 9, [8, 3, 6])]
    positions = [p for start, stop, _ in chunks for p in range(start, stop)]
    slots = [
        blocks[p // BLOCK] * BLOCK + p % BLOCK for start, stop, blocks in chunks for p in range(start, stop)
    ]

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return AttentionInputs(
        ints(positions),
        ints(slots),
        ints([0, 4, 5, 14]),
        ints([7, 1, 9]),
        ints([blocks for _, _, blocks in chunks]),
    )


def fill_past(layer: KVLayer) -> None:
    """Tokens 0..2 of request 0, which an earlier step has written."""
    past = AttentionInputs(
        *(torch.tensor(v, dtype=torch.int32) for v in ([0, 1, 2], [20, 21, 22], [0, 3], [3], [[5]]))
    )
    width = (HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim
    OPS.rope_kv_write(torch.randn(3, width), HEADS, past, layer, None)


def stored(layer: KVLayer, blocks: list[int], position: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    block, offset = blocks[position // BLOCK], position % BLOCK
    k, v = layer.k[block, head, offset].double(), layer.v[block, head, offset].double()
    if layer.k_scale is not None and layer.v_scale is not None:
        k, v = k * layer.k_scale[block, head, offset], v * layer.v_scale[block, head, offset]
    return k, v


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 0.7), (5, 2.0)])
def test_attention_equals_a_loop_over_every_pair(int8: bool, window: int, softcap: float) -> None:
    layer, inputs = make_layer(int8), make_inputs()
    fill_past(layer)
    width = (HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim
    q = OPS.rope_kv_write(torch.randn(14, width), HEADS, inputs, layer, None)
    out = OPS.attention(q, HEADS, inputs, layer, 0.4, window, softcap).view(14, HEADS.num_heads, -1)
    request = [0] * 4 + [1] + [2] * 9
    for m in range(14):
        position, blocks = int(inputs.positions[m]), inputs.block_tables[request[m]].tolist()
        first = max(0, position - window + 1) if window else 0
        for h in range(HEADS.num_heads):
            query = q[m].view(HEADS.num_heads, -1)[h].double()
            pairs = [stored(layer, blocks, p, h // 2) for p in range(first, position + 1)]
            scores = [float(query @ k) * 0.4 for k, _ in pairs]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            weights = [math.exp(s) for s in scores]
            expected = sum(w * v for w, (_, v) in zip(weights, pairs, strict=True)) / sum(weights)
            torch.testing.assert_close(out[m, h].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("int8", [False, True])
def test_rope_norms_rotates_and_writes(int8: bool) -> None:
    layer, inputs = make_layer(int8), make_inputs()
    angles = torch.arange(9).unsqueeze(1) * torch.tensor([1.0, 0.1])
    rope = RopeTable(angles.cos(), angles.sin())
    norm = QKNorm(torch.randn(6), torch.randn(6), 1e-6)
    qkv = torch.randn(14, 8, 6)
    q = OPS.rope_kv_write(qkv.flatten(1), HEADS, inputs, layer, rope, norm).view(14, 4, 6)

    def expected(x: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
        x = x / (x.square().mean() + 1e-6).sqrt() * weight
        turned = torch.complex(x[:2], x[2:4]) * torch.polar(torch.ones(2), angles[position])
        return torch.cat([turned.real, turned.imag, x[4:]])

    blocks = [[5, 2, 0]] * 4 + [[1, 0, 0]] + [[8, 3, 6]] * 9
    for m in range(14):
        position = int(inputs.positions[m])
        for h in range(4):
            torch.testing.assert_close(q[m, h], expected(qkv[m, h], norm.q_weight, position))
        for h in range(2):
            k, v = stored(layer, blocks[m], position, h)
            wanted = expected(qkv[m, 4 + h], norm.k_weight, position)
            half_step = 0.51 / 127 if int8 else 1e-6
            assert (k - wanted).abs().max() <= half_step * wanted.abs().max() + 1e-6
            assert (v - qkv[m, 6 + h]).abs().max() <= half_step * qkv[m, 6 + h].abs().max() + 1e-6


def test_a_row_does_not_depend_on_its_company() -> None:
    packed, x = OPS.pack(random_weight(65, 200, 4, 32)), torch.randn(33, 200)
    whole = OPS.linear(x, packed)
    assert all(torch.equal(OPS.linear(x[i : i + 1], packed)[0], whole[i]) for i in range(33))
