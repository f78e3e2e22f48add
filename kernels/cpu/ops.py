"""The op table in C, called through ctypes; see quantd.kernels.ops for what each op computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64, pointer

import torch
from torch import Tensor

from quantd.kernels.cpu import library
from quantd.kernels.cpu.library import Kind, Library, Step
from quantd.kernels.cpu.program import Call, Replay, place
from quantd.kernels.cpu.shortlist import shortlists_in_c
from quantd.kernels.cpu.weights import PackedMatrix, pack
from quantd.kernels.ops import Activation, AttentionInputs, HeadShape, KVLayer, QKNorm, RopeTable
from quantd.kernels.shortlist import Cut, Masks, Row, Shortlist
from quantd.kernels.weights import Weight

_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
_KV_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
_MAX_HEAD_DIM = 1024


class CpuOps:
    """The `Ops` of one machine's CPU. Threads sleep between calls; one caller at a time.

    int8_activations: inputs of quantized weights are rounded to INT8 per 32 inputs, or per token where
    a checkpoint asks for that, and queries over an INT8 pool per head. Otherwise nothing is rounded,
    and results are within rounding of fp32 arithmetic of the reference.
    Either way the bits of a row depend on that row alone.
    """

    def __init__(self, lib: Library, int8_activations: bool) -> None:
        self._lib = lib
        self._int8 = int8_activations
        self._calls: list[Call] | None = None  # of the forward being recorded

    @property
    def name(self) -> str:
        """ "cpu" and the path compiled in: "cpu avx2", "cpu avx512-vnni", ..."""
        return f"cpu {self._lib.path_name}"

    @property
    def build(self) -> str:
        """See Ops: sources, compiler, flags and CPU, and how inputs are rounded."""
        return f"{self._lib.name} {'int8' if self._int8 else 'float'}"

    def pack(self, weight: Weight, bias: Tensor | None = None) -> PackedMatrix:
        """Bring a weight into panels; see quantd.kernels.cpu.weights.pack."""
        return pack(self._lib, weight, bias, self._int8)

    def linear(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x [M, K] @ W.T + bias -> [M, N]."""
        return self._linear(x, packed, library.LinearArgs(scale=1.0))

    def logits(self, x: Tensor, packed: PackedMatrix, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """linear(x) * scale, softcapped -> [M, N].

        Nothing comes after it that would even errors out, so inputs are rounded finely (see csrc/abi.h).
        """
        return self._linear(x, packed, library.LinearArgs(scale=scale, softcap=softcap, fine=True))

    def _linear(self, x: Tensor, packed: PackedMatrix, args: library.LinearArgs) -> Tensor:
        x, out = _rows(x, packed.shape[1]), _new(x, packed.shape[0])
        args.weight = pointer(packed.struct)
        self._run(Call(Kind.LINEAR, args, {"x": x}, {"out": out}, _step(x), (packed,)))
        return out

    def embedding(self, token_ids: Tensor, packed: PackedMatrix, scale: float = 1.0) -> Tensor:
        """Rows `token_ids` [M] of W, times scale -> [M, K]."""
        token_ids = token_ids.to(torch.int32).contiguous()
        out = _new(token_ids, packed.shape[1])
        args = library.EmbeddingArgs(weight=pointer(packed.struct), scale=scale)
        step = Step(num_tokens=len(token_ids), token_ids=token_ids.data_ptr())
        self._run(Call(Kind.EMBEDDING, args, {}, {"out": out}, step, (packed, token_ids)))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight."""
        x, out = _rows(x, len(weight)), _new(x, len(weight))
        args = library.NormArgs(weight=_constant(weight), width=len(weight), eps=eps)
        self._run(Call(Kind.NORM, args, {"x": x}, {"out": out}, _step(x), (weight,)))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(s), s) with s = residual + scale * x."""
        width = len(weight)
        x, residual = _rows(x, width), _rows(residual, width)
        out, total = _new(x, width), _new(x, width)
        args = library.NormArgs(weight=_constant(weight), width=width, eps=eps, scale=scale)
        reads, writes = {"x": x, "residual": residual}, {"out": out, "sum": total}
        self._run(Call(Kind.NORM, args, reads, writes, _step(x), (weight,)))
        return out, total

    def rope_kv_write(
        self,
        qkv: Tensor,
        heads: HeadShape,
        inputs: AttentionInputs,
        layer: KVLayer,
        rope: RopeTable | None,
        qk_norm: QKNorm | None = None,
    ) -> Tensor:
        """Rotated queries [M, num_heads * D]; writes keys and values into `layer`."""
        assert heads.head_dim <= _MAX_HEAD_DIM, heads
        qkv = _rows(qkv, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
        out, kv = _new(qkv, heads.num_heads * heads.head_dim), _kv(layer)
        args = library.RopeArgs(kv=pointer(kv), heads=_heads(heads))
        if rope is not None:
            args.cos, args.sin = _constant(rope.cos), _constant(rope.sin)
            args.rotary_dim = 2 * rope.cos.shape[1]
        if qk_norm is not None:
            args.q_norm, args.k_norm = _constant(qk_norm.q_weight), _constant(qk_norm.k_weight)
            args.eps = qk_norm.eps
        keep = (kv, layer, rope, qk_norm, inputs)
        self._run(Call(Kind.ROPE, args, {"qkv": qkv}, {"out": out}, _step(qkv, inputs), keep))
        return out

    def attention(
        self,
        q: Tensor,
        heads: HeadShape,
        inputs: AttentionInputs,
        layer: KVLayer,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal attention of q [M, num_heads * D] over the pool -> [M, num_heads * D]."""
        assert heads.head_dim <= _MAX_HEAD_DIM, heads
        q, kv = _rows(q, heads.num_heads * heads.head_dim), _kv(layer)
        out = _new(q, q.shape[1])
        args = library.AttentionArgs(
            kv=pointer(kv), heads=_heads(heads), window=window, scale=scale, softcap=softcap
        )
        args.int8_queries = self._int8 and layer.k_scale is not None
        step, keep = _step(q, inputs), (kv, layer, inputs)
        self._run(Call(Kind.ATTENTION, args, {"q": q}, {"out": out}, step, keep))
        return out

    def glu(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(left half) * right half of gate_up [M, 2 I] -> [M, I]."""
        width = gate_up.shape[1] // 2
        gate_up, out = _rows(gate_up, 2 * width), _new(gate_up, width)
        args = library.GluArgs(width=width, activation=_ACTIVATIONS[activation])
        self._run(Call(Kind.GLU, args, {"gate_up": gate_up}, {"out": out}, _step(gate_up)))
        return out

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """[M, N_i] each -> [M, sum of N_i]."""
        widths = [part.shape[1] for part in parts]
        out, column = _new(parts[0], sum(widths)), 0
        for part, width in zip(parts, widths, strict=True):
            x = _rows(part, width)
            args = library.CopyArgs(width=width, out_width=sum(widths), column=column)
            self._run(Call(Kind.COPY, args, {"x": x}, {"out": out}, _step(x)))
            column += width
        return out

    def shortlists(self, rows: Sequence[Row], cuts: Sequence[Cut], masks: Masks = ()) -> list[Shortlist]:
        """See quantd.kernels.shortlist."""
        return shortlists_in_c(self._lib, rows, cuts, masks)

    def compile(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward` (token_ids, inputs, kv) recorded on its first call and replayed, with the same bits.

        kv must be the same list each time, else it is recorded anew; token_ids int32.
        """
        return Replay(self._lib, forward, self._record)

    def _record(self, forward: Callable[[], Tensor]) -> tuple[Tensor, list[Call]]:
        """Run it; its result, and the calls it made."""
        self._calls = calls = list[Call]()
        try:
            return forward(), calls
        finally:
            self._calls = None

    def _run(self, call: Call) -> None:
        call.point()
        self._lib.run([library.Op(call.kind, addressof(call.args))], call.step)
        if self._calls is not None:
            self._calls.append(call)


def _rows(x: Tensor, width: int) -> Tensor:
    """x as contiguous float32 [M, width]."""
    assert x.ndim == 2 and x.shape[1] == width and x.dtype == torch.float32, (x.shape, x.dtype, width)
    return x.contiguous()


def _new(like: Tensor, width: int) -> Tensor:
    return torch.empty(len(like), width)


def _constant(tensor: Tensor) -> int:
    assert tensor.dtype == torch.float32 and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    return tensor.data_ptr()


def _heads(heads: HeadShape) -> library.Heads:
    return library.Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim)


def _step(x: Tensor, inputs: AttentionInputs | None = None) -> Step:
    step = Step(num_tokens=len(x))
    if inputs is not None:
        place(step, inputs)
    return step


def _kv(layer: KVLayer) -> library.KV:
    kv = library.KV(block_size=layer.k.shape[2], type=_KV_TYPES[layer.k.dtype])
    for name, tensor in (
        ("k", layer.k),
        ("v", layer.v),
        ("k_scale", layer.k_scale),
        ("v_scale", layer.v_scale),
    ):
        if tensor is not None:
            setattr(kv, name, tensor.data_ptr())
            setattr(kv, f"{name}_stride", (c_int64 * 3)(*tensor.stride()[:3]))
    assert layer.k.stride(3) == layer.v.stride(3) == 1, (layer.k.stride(), layer.v.stride())
    return kv
