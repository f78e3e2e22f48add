"""A whole decoder on the GPU's ops: its logits against the reference's, and bit by bit against a batch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantd.engine.models.decoder import Decoder
from quantd.engine.models.spec import DecoderSpec, LayerSpec
from quantd.engine.weights import DecoderWeights, LayerWeights
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer, Ops, QKNorm, RopeTable
from quantd.kernels.reference import ReferenceOps
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight
from quantd.quant.kv import FORMATS, KVPool, KVShape

BLOCK_SIZE = 4
HIDDEN, INNER, VOCAB = 64, 96, 48
HEADS = HeadShape(4, 2, 16)
SPEC = DecoderSpec(
    model_type="tiny",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    heads=HEADS,
    layers=(LayerSpec(), LayerSpec(window=5)),
    ropes=(),
    max_model_len=32,
    norm_eps=1e-5,
    attention_scale=0.25,
    tied=False,
    residual_scale=0.7,
    logits_softcap=8.0,
)
PROMPTS = [[3, 7, 1, 9], [5], [*range(20, 27)]]
BLOCKS = [[4, 0], [2, 0], [1, 3]]
Chunk = tuple[int, int, int]  # request, first token, behind the last
# Prefill, then a decode beside the end of a prefill, then decodes.
STEPS: list[list[Chunk]] = [
    [(0, 0, 2), (2, 0, 3)],
    [(0, 2, 3), (1, 0, 1), (2, 3, 6)],
    [(0, 3, 4), (2, 6, 7)],
]


def quantized(
    n: int, k: int, bits: int, group: int, perm: bool = False, input_bits: int | None = None
) -> Weight:
    """Like a GPTQ matrix (perm: with act-order), or one for inputs in INT8."""
    groups = -(-k // group)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    scale = (torch.rand(n, groups) + 0.5) * 0.6 / 2**bits
    zeros = torch.full((n, groups), 2.0 ** (bits - 1))
    if input_bits is None:
        zeros += torch.randint(-1, 2, (n, groups))
    return QuantizedWeight(
        codes, scale, -scale * zeros, bits, group, torch.randperm(k) if perm else None, input_bits
    )


def layer(ops: Ops, device: str, seed: int) -> LayerWeights:
    torch.manual_seed(seed)
    width = HEADS.num_heads * HEADS.head_dim

    def norm(size: int) -> Tensor:
        return (1 + 0.3 * torch.randn(size)).to(device)

    qkv = ops.pack(quantized(width, HIDDEN, 4, 32, perm=True), torch.randn(width))
    kv = ops.pack(quantized(width, HIDDEN, 8, HIDDEN, input_bits=8))
    return LayerWeights(
        attention_norm=norm(HIDDEN),
        qkv=(qkv, kv),
        qk_norm=QKNorm(norm(HEADS.head_dim), norm(HEADS.head_dim), 1e-6),
        o=(ops.pack(quantized(HIDDEN, width, 4, 32)),),
        after_attention_norm=norm(HIDDEN),
        mlp_norm=norm(HIDDEN),
        gate_up=(ops.pack(quantized(2 * INNER, HIDDEN, 8, HIDDEN, input_bits=8)),),
        down=(ops.pack(quantized(HIDDEN, INNER, 3, 32)),),
        after_mlp_norm=None,
    )


def decoder(ops: Ops, device: str = "cpu") -> Decoder:
    layers = tuple(layer(ops, device, seed) for seed in (1, 2))
    torch.manual_seed(0)
    angles = torch.outer(torch.arange(32.0), 100.0 ** -torch.linspace(0, 1, 4))
    weights = DecoderWeights(
        embedding=ops.pack(DenseWeight(torch.randn(VOCAB, HIDDEN).half())),
        layers=layers,
        final_norm=torch.ones(HIDDEN, device=device),
        head=ops.pack(quantized(VOCAB, HIDDEN, 4, 32)),
        ropes=(RopeTable(angles.cos().to(device), angles.sin().to(device)),),
    )
    return Decoder(SPEC, weights, ops)


def pool(kv_dtype: str, device: str) -> list[KVLayer]:
    """Not written by anyone: NaN where a type has it."""
    made = KVPool.allocate(FORMATS[kv_dtype], KVShape(2, HEADS.num_kv_heads, HEADS.head_dim, BLOCK_SIZE), 5)
    made.data.fill_(0xFF)
    return replace(made, data=made.data.to(device)).layers()


def inputs(chunks: Sequence[Chunk], device: str) -> AttentionInputs:
    positions = [p for _, start, stop in chunks for p in range(start, stop)]
    slots = [
        BLOCKS[r][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for r, start, stop in chunks
        for p in range(start, stop)
    ]
    starts = [0]
    for _, start, stop in chunks:
        starts.append(starts[-1] + stop - start)
    lengths = [stop for _, _, stop in chunks]
    tables = [BLOCKS[r] for r, _, _ in chunks]
    tensors = (positions, slots, starts, lengths, tables)
    return AttentionInputs(*(torch.tensor(t, dtype=torch.int32, device=device) for t in tensors))


def run(model: Decoder, kv_dtype: str, steps: Sequence[Sequence[Chunk]], device: str = "cpu") -> list[Tensor]:
    """The logits of every token of each request that the steps compute, [len, V]."""
    kv = pool(kv_dtype, device)
    parts: dict[int, list[Tensor]] = {}
    for chunks in steps:
        ids = [token for r, start, stop in chunks for token in PROMPTS[r][start:stop]]
        hidden = model.forward(
            torch.tensor(ids, dtype=torch.int32, device=device), inputs(chunks, device), kv
        )
        rows = model.logits(hidden).cpu().split([stop - start for _, start, stop in chunks])
        for (r, _, _), logits in zip(chunks, rows, strict=True):
            parts.setdefault(r, []).append(logits)
    return [torch.cat(parts[r]) for r in sorted(parts)]


# Rounding to INT8 makes steps of a small difference in what is rounded.
@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "tolerance"),
    [
        ("int8", torch.float32, 2e-3),
        ("int8", torch.float16, 5e-2),
        ("bf16", torch.bfloat16, 5e-2),
    ],
    ids=str,
)
def test_logits_are_those_of_the_reference(
    gpu_device: str, kv_dtype: str, dtype: torch.dtype, tolerance: float
) -> None:
    expected = run(decoder(ReferenceOps()), kv_dtype, STEPS)
    ours = run(decoder(GpuOps(gpu_device, dtype), gpu_device), kv_dtype, STEPS, gpu_device)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(("kv_dtype", "dtype"), [("int8", torch.float16), ("bf16", torch.bfloat16)], ids=str)
def test_a_request_s_bits_are_the_same_alone(gpu_device: str, kv_dtype: str, dtype: torch.dtype) -> None:
    model = decoder(GpuOps(gpu_device, dtype, same_bits=True), gpu_device)
    together = run(model, kv_dtype, STEPS, gpu_device)
    (alone,) = run(model, kv_dtype, [[(2, 0, len(PROMPTS[2]))]], gpu_device)
    assert torch.equal(alone, together[2])


def test_norms_round_for_layers_that_ask(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer takes the codes that the norm hands on, which are those it would have made of its rows."""
    ops = GpuOps(gpu_device, torch.float16)
    torch.manual_seed(0)
    packed = ops.pack(quantized(24, HIDDEN, 8, HIDDEN, input_bits=8))
    x, weight = torch.randn(3, HIDDEN, device=gpu_device), torch.ones(HIDDEN, device=gpu_device)
    normed, total = ops.add_rms_norm(x, x, weight, 1e-5)
    expected = ops.linear(normed.clone(), packed)
    monkeypatch.delattr("quantd.kernels.gpu.inputs.quantize_rows")
    assert torch.equal(ops.linear(normed, packed), expected)
    assert torch.equal(ops.linear(ops.rms_norm(total, weight, 1e-5), packed), expected)


def test_inputs_stay_floats_where_asked() -> None:
    ops = GpuOps("cpu", torch.float16, activations="fp32")
    assert not ops.pack(quantized(16, 64, 8, 64, input_bits=8)).rounds_inputs
    assert GpuOps("cpu", torch.float16).pack(quantized(16, 64, 8, 64, input_bits=8)).rounds_inputs
    assert GpuOps("cpu", torch.bfloat16).name.endswith(" bf16")
