"""Every kernel on this GPU against the reference on the CPU, over small and odd shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from sides.report import Row
from torch import Tensor

from gpu_sides.pools import BLOCK_SIZE, new_pool, step
from gpu_sides.setup import DTYPES, Measure, Setup
from quantd.kernels.gpu.activation import glu
from quantd.kernels.gpu.attention import attention
from quantd.kernels.gpu.dequantize import embedding
from quantd.kernels.gpu.kv_cache import copy_blocks, gather_blocks, scatter_blocks
from quantd.kernels.gpu.linear import linear, logits
from quantd.kernels.gpu.norm import add_rms_norm, add_rms_norm_rounded, rms_norm
from quantd.kernels.gpu.rope import rope_kv_write
from quantd.kernels.gpu.sampling import sample
from quantd.kernels.gpu.sampling_inputs import Draw, SamplingInputs
from quantd.kernels.gpu.tuning import Gpu, Tuning
from quantd.kernels.gpu.weights import pack
from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer, QKNorm, RopeTable
from quantd.kernels.reference import ReferenceOps
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight
from quantd.quant.kv import KVPool

REFERENCE = ReferenceOps()
CPU = torch.device("cpu")
# What a result of some hundred terms may be off by, of the largest.
_HALF_STEPS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}
_CODE = 8e-3  # between two codes of INT8, of the largest
_N, _K = 80, 256


def checks(setup: Setup) -> Iterator[Measure]:
    """One a kernel: the largest error against the largest value, or how many results are wrong."""
    for type_name, dtype in DTYPES.items():
        one = replace(setup, dtype=dtype)
        for name, error, tolerance in (*_linears(one), *_attentions(one), *_rows(one)):
            yield _measure(f"{name}, {type_name}", error, tolerance)
    for name, error, tolerance in _others(setup):
        yield _measure(name, error, tolerance)


Check = tuple[str, Callable[[], float], "float | None"]


def _measure(name: str, error: Callable[[], float], tolerance: float | None) -> Measure:
    return Measure(name, lambda: Row(f"check: {name}", "", error(), tolerance, better="less"))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value; Inf where shapes differ or anything is NaN."""
    actual, expected = actual.cpu().double(), expected.cpu().double()
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())


def _quantized(bits: int, group: int, perm: bool = False, input_bits: int | None = None) -> QuantizedWeight:
    """perm: with act-order and zero points; else symmetric."""
    codes = torch.randint(0, 2**bits, (_N, _K), dtype=torch.uint8)
    scale = ((torch.rand(_N, -(-_K // group)) + 0.5) * 0.1 / 2**bits).half().float()
    zeros = torch.full_like(scale, 2.0 ** (bits - 1))
    if perm:
        zeros += torch.randint(-1, 2, zeros.shape)
    order = torch.randperm(_K) if perm else None
    return QuantizedWeight(codes, scale, -scale * zeros, bits, group, order, input_bits)


def _linears(setup: Setup) -> Iterator[Check]:
    weights: dict[str, Weight] = {f"W{bits}A16": _quantized(bits, 128) for bits in setup.sizes.check_bits}
    weights["W4A16 with act-order and zero points"] = _quantized(4, 32, perm=True)
    weights["W8A8"] = _quantized(8, _K, input_bits=8)
    weights["plain"] = DenseWeight((torch.randn(_N, _K) * 0.1).to(setup.dtype))
    half_step = _HALF_STEPS[setup.dtype]
    for name, weight in weights.items():
        for same_bits in (False, True):
            label = f"linear {name}{', same bits' if same_bits else ''}"
            yield label, partial(_linear_error, setup, weight, setup.tuning, same_bits), half_step
        other_bits = partial(_other_bits, setup, weight, setup.tuning)
        yield f"bits of a row of linear {name} alone", other_bits, setup.bits_goal()
    yield "logits", partial(_logits_error, setup, _quantized(4, 128)), half_step
    yield "embedding", partial(_embedding_error, setup, _quantized(4, 128)), half_step


def _linear_error(setup: Setup, weight: Weight, tuning: Tuning, same_bits: bool) -> float:
    bias = torch.randn(_N)
    packed = pack(weight, bias, setup.device, setup.dtype)
    errors = []
    for rows in setup.sizes.check_rows:
        x = torch.randn(rows, _K).to(setup.dtype)
        ours = linear(x.to(setup.device), packed, tuning, same_bits)
        errors.append(relative_error(ours, REFERENCE.linear(x.float(), REFERENCE.pack(weight, bias))))
    return max(errors)


def _other_bits(setup: Setup, weight: Weight, tuning: Tuning) -> int:
    """Rows that do not have the bits alone that they have among others."""
    packed = pack(weight, None, setup.device, setup.dtype)
    num_rows = max(setup.sizes.check_rows)
    x = torch.randn(num_rows, _K).to(setup.device, setup.dtype)
    together = linear(x, packed, tuning, same_bits=True)
    return sum(
        not torch.equal(linear(x[i : i + 1], packed, tuning, same_bits=True)[0], together[i])
        for i in (0, num_rows - 1)
    )


def _logits_error(setup: Setup, weight: Weight) -> float:
    x = torch.randn(17, _K).to(setup.dtype)
    ours = logits(x.to(setup.device), pack(weight, None, setup.device, setup.dtype), setup.tuning, 0.5, 8.0)
    return relative_error(ours, REFERENCE.logits(x.float(), REFERENCE.pack(weight), 0.5, 8.0))


def _embedding_error(setup: Setup, weight: Weight) -> float:
    ids = torch.tensor([3, 0, _N - 1, 3], dtype=torch.int32)
    ours = embedding(ids.to(setup.device), pack(weight, None, setup.device, setup.dtype), 2.0)
    return relative_error(ours, REFERENCE.embedding(ids, REFERENCE.pack(weight), 2.0))


def _attentions(setup: Setup) -> Iterator[Check]:
    for name, format, heads, window, softcap in (
        ("INT8 KV", "int8", HeadShape(8, 2, 128), 0, 0.0),
        ("INT8 KV, heads of 64", "int8", HeadShape(9, 3, 64), 0, 0.0),
        ("INT8 KV, window and soft cap, heads of 256", "int8", HeadShape(4, 2, 256), 33, 20.0),
        (f"{setup.type_name} KV", setup.type_name, HeadShape(8, 2, 128), 0, 0.0),
        (f"{setup.type_name} KV, heads of 64", setup.type_name, HeadShape(9, 3, 64), 0, 0.0),
        (f"{setup.type_name} KV, heads of 80", setup.type_name, HeadShape(4, 4, 80), 0, 0.0),
    ):
        error = partial(_attention_error, setup, format, heads, window, softcap)
        yield f"attention, {name}", error, _HALF_STEPS[setup.dtype]
    yield "bits of a request's attention alone", partial(_other_attention_bits, setup), setup.bits_goal()
    for format in ("int8", setup.type_name):
        error = partial(_rope_error, setup, format)
        yield f"rope and {format} KV write, queries", error, _HALF_STEPS[setup.dtype]
        yield f"rope and {format} KV write, cache", partial(_written_error, setup, format), 1.25 * _CODE


def _attention_error(setup: Setup, format: str, heads: HeadShape, window: int, softcap: float) -> float:
    theirs, inputs = _cpu_pool(setup, format, heads), step(setup.sizes.check_spans, CPU)
    q = torch.randn(len(inputs.positions), heads.num_heads * heads.head_dim).to(setup.dtype)
    scale = heads.head_dim**-0.5
    expected = REFERENCE.attention(q.float(), heads, inputs, theirs.layers()[0], scale, window, softcap)
    layer = _moved(setup, theirs)
    ours = attention(q.to(setup.device), heads, _on(setup, inputs), layer, scale, window, softcap)
    return relative_error(ours, expected)


def _other_attention_bits(setup: Setup) -> int:
    """Requests whose rows have other bits alone."""
    heads = HeadShape(8, 2, 128)
    layer, inputs = (
        _moved(setup, _cpu_pool(setup, "int8", heads)),
        _on(setup, step(setup.sizes.check_spans, CPU)),
    )
    q = torch.randn(len(inputs.positions), heads.num_heads * heads.head_dim).to(setup.device, setup.dtype)
    together = attention(q, heads, inputs, layer, 0.1)
    wrong, starts = 0, inputs.query_start.tolist()
    for r, (first, last) in enumerate(pairwise(starts)):
        one = AttentionInputs(
            inputs.positions[first:last],
            inputs.slots[first:last],
            inputs.query_start[r : r + 2] - first,
            inputs.context_len[r : r + 1],
            inputs.block_tables[r : r + 1].contiguous(),
        )
        wrong += not torch.equal(attention(q[first:last], heads, one, layer, 0.1), together[first:last])
    return wrong


def _rope(setup: Setup, format: str) -> tuple[Tensor, Tensor, KVPool, KVPool, AttentionInputs]:
    """Queries of the reference and ours, and the pools that both wrote to."""
    heads, inputs = HeadShape(8, 2, 128), step(setup.sizes.check_spans, CPU)
    angles = torch.outer(torch.arange(300.0), torch.rand(64))
    rope = RopeTable(angles.cos(), angles.sin())
    norm = QKNorm(torch.rand(128), torch.rand(128), 1e-6)
    qkv = torch.randn(len(inputs.positions), 12 * 128).to(setup.dtype)
    theirs = _cpu_pool(setup, format, heads)
    ours = replace(theirs, data=theirs.data.to(setup.device, copy=True))
    expected = REFERENCE.rope_kv_write(qkv.float(), heads, inputs, theirs.layers()[0], rope, norm)
    to = partial(torch.Tensor.to, device=setup.device)
    q = rope_kv_write(
        to(qkv),
        heads,
        _on(setup, inputs),
        ours.layers()[0],
        RopeTable(to(rope.cos), to(rope.sin)),
        QKNorm(to(norm.q_weight), to(norm.k_weight), 1e-6),
    )
    return expected, q, theirs, ours, inputs


def _rope_error(setup: Setup, format: str) -> float:
    expected, q, *_ = _rope(setup, format)
    return relative_error(q, expected)


def _written_error(setup: Setup, format: str) -> float:
    """Of keys and values as they are read back. Codes may differ by a step where a value lies between two."""
    _, _, theirs, ours, _ = _rope(setup, format)
    pairs = zip(_values(ours.layers()[0]), _values(theirs.layers()[0]), strict=True)
    return max(relative_error(one, other) for one, other in pairs)


def _values(layer: KVLayer) -> list[Tensor]:
    halves = ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
    return [codes.float() * (1 if scale is None else scale.unsqueeze(-1)) for codes, scale in halves]


def _cpu_pool(setup: Setup, format: str, heads: HeadShape) -> KVPool:
    spans = setup.sizes.check_spans
    return new_pool(format, heads, 1, len(spans) * (max(last for _, last in spans) + BLOCK_SIZE), CPU)


def _moved(setup: Setup, pool: KVPool) -> KVLayer:
    return replace(pool, data=pool.data.to(setup.device)).layers()[0]


def _on(setup: Setup, inputs: AttentionInputs) -> AttentionInputs:
    return AttentionInputs(*(tensor.to(setup.device) for tensor in vars(inputs).values()))


def _rows(setup: Setup) -> Iterator[Check]:
    half_step = _HALF_STEPS[setup.dtype]
    yield "rms_norm", partial(_norm_error, setup), half_step
    yield "add_rms_norm", partial(_add_norm_error, setup), half_step
    yield "add_rms_norm, rounded to INT8", partial(_rounded_error, setup), half_step + _CODE
    yield "silu and multiply", partial(_glu_error, setup), half_step


def _others(setup: Setup) -> Iterator[Check]:
    """What has one type, or none."""
    turing = Tuning(Gpu("as on sm_75", 75, setup.tuning.gpu.num_sms))
    halves, weight = replace(setup, dtype=torch.float16), _quantized(4, 128)
    error = partial(_linear_error, halves, weight, turing, False)
    yield "linear W4A16 as on sm_75", error, _HALF_STEPS[torch.float16]
    other_bits = partial(_other_bits, halves, weight, turing)
    yield "bits of a row of linear W4A16 alone as on sm_75", other_bits, setup.bits_goal()
    yield "blocks copied, gathered, scattered", partial(_wrong_blocks, setup), 0
    yield "sampling: rows with a wrong token", partial(_wrong_samples, setup), 0


def _norm_error(setup: Setup) -> float:
    x, weight = torch.randn(7, 576), torch.rand(576)
    ours = rms_norm(x.to(setup.device), weight.to(setup.device), 1e-5, setup.dtype)
    return relative_error(ours, REFERENCE.rms_norm(x, weight, 1e-5))


def _sum_and_norm(setup: Setup) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Arguments of a norm behind a sum on the device, and what the reference makes of them."""
    x, residual, weight = torch.randn(7, 576).to(setup.dtype), torch.randn(7, 576), torch.rand(576)
    expected = REFERENCE.add_rms_norm(x.float(), residual, weight, 1e-5, 0.7)
    return tuple(tensor.to(setup.device) for tensor in (x, residual, weight)), expected


def _add_norm_error(setup: Setup) -> float:
    (x, residual, weight), expected = _sum_and_norm(setup)
    ours = add_rms_norm(x, residual, weight, 1e-5, 0.7, setup.dtype)
    return max(relative_error(one, other) for one, other in zip(ours, expected, strict=True))


def _rounded_error(setup: Setup) -> float:
    (x, residual, weight), (expected, _) = _sum_and_norm(setup)
    *_, rounded = add_rms_norm_rounded(x, residual, weight, 1e-5, 0.7, setup.dtype)
    return relative_error(rounded.codes * rounded.scale[:, None], expected)


def _glu_error(setup: Setup) -> float:
    x = torch.randn(5, 2 * 1100).to(setup.dtype)
    return relative_error(glu(x.to(setup.device), "silu"), REFERENCE.glu(x.float(), "silu"))


def _wrong_blocks(setup: Setup) -> int:
    """Bytes that are not where they were copied to."""
    before = torch.randint(0, 256, (9, 640), dtype=torch.uint8)
    pool, ids = before.to(setup.device, copy=True), torch.tensor([[1, 4], [7, 2]], dtype=torch.int32)
    copy_blocks(pool, *ids.to(setup.device))
    host = torch.empty(3, 640, dtype=torch.uint8, pin_memory=setup.device.type == "cuda")
    gather_blocks(pool, [7, 2, 3], host)
    scatter_blocks(pool, [0, 5, 6], host)
    expected = before[[1, 1, 4, 3, 4, 4, 3, 1, 8]]
    return int((pool.cpu() != expected).sum())


def _wrong_samples(setup: Setup) -> int:
    """Rows whose greedy token is not the likeliest, or whose draw from five is none of the five likeliest."""
    x = torch.randn(2, setup.sizes.vocab_size) * 3
    draws = [Draw(0.0, 1, 0), Draw(1.0, 2, 4, top_k=5)]
    samples = sample(x.to(setup.device), SamplingInputs.of(draws, setup.device))
    best = x.topk(5).indices
    allowed = torch.cat([best[:1, :1].expand(1, 5), best[1:]])
    return int((~(allowed == samples.token_ids.cpu()[:, None]).any(1)).sum())
