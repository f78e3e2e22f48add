"""The specification: every op of a forward in plain torch, and the oracle of every other backend.

An op takes and returns float32, computes in float64 and rounds once. So it stands for the exact
answer, and what a row gets does not hang on the rows beside it but for a tie of rounding.
Weights stay in memory as small as they came; rows of them are dequantized when an op needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from quantd.kernels.ops import Activation, AttentionInputs, HeadShape, KVLayer, QKNorm, RopeTable
from quantd.kernels.shortlist import Cut, Masks, Row, Shortlist, shortlists
from quantd.kernels.weights import DenseWeight, Weight

Activations = Literal["auto", "fp32"]

# Weight elements dequantized at a time: bounds what a large vocabulary takes in passing.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class PackedDense:
    """A plain matrix [N, K] in the type it was stored in. bias: float32 [N]."""

    values: Tensor
    bias: Tensor | None
    input_bits: None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return _nbytes(self.values, self.bias)

    def rows(self, index: Tensor | slice) -> Tensor:
        """Rows `index` -> float64 [rows, K]."""
        return self.values[index].double()


@dataclass(frozen=True)
class PackedCodes:
    """A QuantizedWeight with its codes packed, 8 // bits to a byte where bits divides 8, else one.

    codes: uint8 [N, ceil(K / codes a byte)], the first code in the lowest bits. inverse: int64 [K]
    puts the columns back into input order. The rest as in QuantizedWeight. bias: float32 [N].
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    group_size: int
    num_inputs: int
    inverse: Tensor | None
    input_bits: int | None
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""
        return self.codes.shape[0], self.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return _nbytes(self.codes, self.scale, self.offset, self.inverse, self.bias)

    def rows(self, index: Tensor | slice) -> Tensor:
        """Rows `index` -> float64 [rows, K], columns in input order."""
        groups, k = self.scale.shape[1], self.num_inputs
        codes = _unpack_codes(self.codes[index], self.bits)[:, :k]
        codes = functional.pad(codes, (0, groups * self.group_size - k))
        values = codes.double().view(len(codes), groups, self.group_size)
        values.mul_(self.scale[index].unsqueeze(2)).add_(self.offset[index].unsqueeze(2))
        values = values.flatten(1)[:, :k]
        return values if self.inverse is None else values[:, self.inverse]


Packed = PackedDense | PackedCodes


class ReferenceOps:
    """The `Ops` of plain torch. activations "fp32": inputs are never rounded to INT8."""

    name = "reference"

    def __init__(self, activations: Activations = "auto") -> None:
        self._rounds_inputs = activations == "auto"

    @property
    def build(self) -> str:
        """See Ops."""
        return "int8" if self._rounds_inputs else "float"

    def pack(self, weight: Weight, bias: Tensor | None = None) -> Packed:
        """Keep a weight, its codes packed into bytes."""
        bias = None if bias is None else bias.float()
        if isinstance(weight, DenseWeight):
            return PackedDense(weight.values, bias)
        return PackedCodes(
            codes=_pack_codes(weight.codes, weight.bits),
            scale=weight.scale,
            offset=weight.offset,
            bits=weight.bits,
            group_size=weight.group_size,
            num_inputs=weight.shape[1],
            inverse=None if weight.perm is None else torch.argsort(weight.perm),
            input_bits=weight.input_bits,
            bias=bias,
        )

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x [M, K] @ W.T + bias -> [M, N]; x is rounded first where the weight asks for INT8 inputs."""
        return self._linear(x, packed).float()

    def embedding(self, token_ids: Tensor, packed: Packed, scale: float = 1.0) -> Tensor:
        """Rows `token_ids` [M] of W, times scale -> [M, K]."""
        return (packed.rows(token_ids) * scale).float()

    def logits(self, x: Tensor, packed: Packed, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """linear(x) * scale, softcapped -> [M, N]."""
        return _softcap(self._linear(x, packed) * scale, softcap).float()

    def _linear(self, x: Tensor, packed: Packed) -> Tensor:
        rounds = packed.input_bits is not None and self._rounds_inputs
        inputs = (rounded_inputs(x) if rounds else x).double()
        n, k = packed.shape
        step = max(_CHUNK_ELEMENTS // k, 1)
        out = torch.cat([inputs @ packed.rows(slice(i, i + step)).T for i in range(0, n, step)], 1)
        return out if packed.bias is None else out + packed.bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight, over the last axis."""
        return _rms_norm(x.double(), weight, eps).float()

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(s), s) with s = residual + scale * x."""
        total = (residual.double() + scale * x.double()).float()
        return self.rms_norm(total, weight, eps), total

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
        vectors = qkv.double().view(len(qkv), -1, heads.head_dim)
        q, k, v = vectors.tensor_split([heads.num_heads, heads.num_heads + heads.num_kv_heads], 1)
        if qk_norm is not None:
            q = _rms_norm(q, qk_norm.q_weight, qk_norm.eps)
            k = _rms_norm(k, qk_norm.k_weight, qk_norm.eps)
        if rope is not None:
            q, k = _rotate(q, inputs.positions, rope), _rotate(k, inputs.positions, rope)
        _write(layer.k, layer.k_scale, inputs.slots, k.float())
        _write(layer.v, layer.v_scale, inputs.slots, v.float())
        return q.float().flatten(1)

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
        out = torch.empty_like(q)
        starts = inputs.query_start.tolist()
        for r, (start, stop) in enumerate(pairwise(starts)):
            length = int(inputs.context_len[r])
            k = _read(layer.k, layer.k_scale, inputs.block_tables[r], length)
            v = _read(layer.v, layer.v_scale, inputs.block_tables[r], length)
            # Query heads h * g .. h * g + g - 1 share key/value head h.
            grouped = q[start:stop].double().view(stop - start, heads.num_kv_heads, -1, heads.head_dim)
            scores = _softcap(torch.einsum("mhgd,hnd->hgmn", grouped, k) * scale, softcap)
            scores.masked_fill_(~_visible(inputs.positions[start:stop], length, window), -torch.inf)
            mixed = torch.einsum("hgmn,hnd->mhgd", scores.softmax(-1), v)
            out[start:stop] = mixed.flatten(1)
        return out

    def glu(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(left half) * right half of gate_up [M, 2 I] -> [M, I]."""
        gate, up = gate_up.double().chunk(2, -1)
        gate = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return (gate * up).float()

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """[M, N_i] each -> [M, sum of N_i]."""
        return torch.cat(tuple(parts), 1)

    def shortlists(self, rows: Sequence[Row], cuts: Sequence[Cut], masks: Masks = ()) -> list[Shortlist]:
        """See quantd.kernels.shortlist."""
        return shortlists(rows, cuts, masks)

    def compile(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Nothing to record."""
        return forward


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes int8 [..., D] and float32 scales [..., 1], a vector at a time, symmetric.

    scale = absmax / 127; codes are x / scale rounded half to even. A zero vector has scale 0.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, x / scale, 0).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def rounded_inputs(x: Tensor) -> Tensor:
    """x [M, K] as a W8A8 layer sees it: float32, each row rounded to INT8 by compressed-tensors' rule.

    scale = absmax / 127.5 (255 steps over twice the absmax), codes -128..127, half to even.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return (x / scale).round().clamp(-128, 127) * scale


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _codes_per_byte(bits: int) -> int:
    return 8 // bits if 8 % bits == 0 else 1


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    per_byte = _codes_per_byte(bits)
    codes = functional.pad(codes, (0, -codes.shape[1] % per_byte))
    packed = codes[:, ::per_byte].clone()
    for i in range(1, per_byte):
        packed |= codes[:, i::per_byte] << (i * bits)
    return packed


def _unpack_codes(packed: Tensor, bits: int) -> Tensor:
    per_byte = _codes_per_byte(bits)
    if per_byte == 1:
        return packed
    parts = [packed >> (i * bits) & (2**bits - 1) for i in range(per_byte)]
    return torch.stack(parts, 2).flatten(1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _softcap(x: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap > 0 else x


def _rotate(x: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
    """x [M, heads, D] rotated by its position."""
    cos, sin = rope.cos[positions, None], rope.sin[positions, None]
    half = cos.shape[-1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)


def _write(cache: Tensor, scales: Tensor | None, slots: Tensor, values: Tensor) -> None:
    """Put values [M, kv_heads, D] into the pool's slots."""
    block, offset = slots // cache.shape[2], slots % cache.shape[2]
    if scales is None:
        cache[block, :, offset] = values.to(cache.dtype)
        return
    codes, scale = quantize_int8(values)
    cache[block, :, offset] = codes
    scales[block, :, offset] = scale.squeeze(-1)


def _read(cache: Tensor, scales: Tensor | None, block_table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a request -> float64 [kv_heads, length, D]."""
    blocks = block_table[: -(-length // cache.shape[2])]
    values = cache[blocks].double()
    if scales is not None:
        values *= scales[blocks].unsqueeze(-1)
    return values.transpose(0, 1).flatten(1, 2)[:, :length]


def _visible(positions: Tensor, length: int, window: int) -> Tensor:
    """bool [M, length]: which keys each query sees."""
    query, key = positions.unsqueeze(1), torch.arange(length, device=positions.device)
    seen = key <= query
    return seen & (key > query - window) if window > 0 else seen
