"""A weight in the layout of csrc/weights.h: codes in panels of 16 outputs, scales beside them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantd.kernels.cpu import library
from quantd.kernels.cpu.library import Header, Inputs, Kind, Library
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight

_PANEL = 16
_BLOCK = 32
_SAMPLE = 16  # rows looked at before all are
_FLOAT_BITS = {torch.float16: 16, torch.bfloat16: 17, torch.float32: 32}


@dataclass(frozen=True)
class PackedMatrix:
    """A packed weight. struct points into the tensors, which it keeps alive."""

    struct: library.Weight
    codes: Tensor
    headers: Tensor | None
    bias: Tensor | None
    perm: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""
        return self.struct.n, self.struct.k

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        tensors = (self.codes, self.headers, self.bias, self.perm)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def pack(lib: Library, weight: Weight, bias: Tensor | None, int8_inputs: bool) -> PackedMatrix:
    """Pack a weight [N, K]; bias [N].

    int8_inputs: whether codes meet inputs rounded to INT8: per token where the weight asks for that, else
    per 32 inputs.
    Codes of 1, 5, 6, 7 bits are kept in the next larger 2 or 8. Group sizes other than 16 and
    multiples of 32 (also one over all inputs) are dequantized to fp32: exact, and rare.
    """
    if isinstance(weight, DenseWeight):
        return _pack_dense(lib, weight.values, bias)
    group = _group(weight)
    if group is None:
        return _pack_dense(lib, weight.dequantize(), bias)
    bits = next(b for b in (2, 3, 4, 8) if b >= weight.bits)
    header, headers = _headers(weight.scale, weight.offset)
    perm = None if weight.perm is None else weight.perm.to(torch.int32)
    inputs = Inputs.FLOAT
    if int8_inputs:
        inputs = Inputs.INT8_BLOCKS if weight.input_bits is None else Inputs.INT8_ROWS
    return _assemble(lib, weight.codes, bits, group, header, headers, bias, perm, inputs)


def _group(weight: QuantizedWeight) -> int | None:
    """Inputs under a scale as the kernels count them, or None for a size they do not take."""
    k, size = weight.shape[1], weight.group_size
    if size >= k:
        return -(-k // _BLOCK) * _BLOCK
    return size if size == 16 or size % _BLOCK == 0 else None


def _pack_dense(lib: Library, values: Tensor, bias: Tensor | None) -> PackedMatrix:
    return _assemble(
        lib, values, _FLOAT_BITS[values.dtype], _BLOCK, Header.HALF, None, bias, None, Inputs.FLOAT
    )


def _assemble(
    lib: Library,
    source: Tensor,
    bits: int,
    group: int,
    header: Header,
    headers: Tensor | None,
    bias: Tensor | None,
    perm: Tensor | None,
    inputs: Inputs,
) -> PackedMatrix:
    n, k = source.shape
    bits_stored = bits & ~1 if bits > 16 else bits
    blocks = -(-n // _PANEL) * -(-k // _BLOCK)
    codes = lib.arena.take(blocks * _PANEL * _BLOCK * bits_stored // 8)
    if headers is not None:
        headers = lib.arena.take(len(headers)).copy_(headers)
    bias = None if bias is None else bias.float().contiguous()
    struct = library.Weight(n=n, k=k, group=group, bits=bits, header=header, inputs=inputs)
    struct.codes, struct.headers, struct.bias, struct.perm = map(_pointer, (codes, headers, bias, perm))
    source = source.contiguous()
    args = library.PackArgs(target=ctypes.pointer(struct), source=source.data_ptr())
    lib.run([library.Op(Kind.PACK, ctypes.addressof(args))], library.Step())
    return PackedMatrix(struct, codes, headers, bias, perm)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _headers(scale: Tensor, offset: Tensor) -> tuple[Header, Tensor]:
    """Scales and offsets [N, G] as the smallest header that keeps every bit of them."""
    zero = _zero_points(scale, offset)
    half = torch.equal(scale.half().float(), scale)
    if half and zero is not None:
        return Header.HALF_ZERO, _interleave(scale.half(), zero)
    if half and torch.equal(offset.half().float(), offset):
        return Header.HALF, _interleave(scale.half(), offset.half())
    if zero is not None:
        return Header.FLOAT_ZERO, _interleave(scale, zero)
    return Header.FLOAT, _interleave(scale, offset)


def _zero_points(scale: Tensor, offset: Tensor) -> Tensor | None:
    """uint8 z with offset = -z * scale exactly, or None."""
    if len(scale) > _SAMPLE and _zero_points(scale[:_SAMPLE], offset[:_SAMPLE]) is None:
        return None
    zero = torch.where(scale != 0, -offset / scale, 0).round()
    if not bool(((zero >= 0) & (zero <= 255)).all()) or not torch.equal(-zero * scale, offset):
        return None
    return zero.to(torch.uint8)


def _interleave(*parts: Tensor) -> Tensor:
    """Parts [N, G] -> bytes of [N / 16, G, parts, 16], N padded with zeros."""
    return torch.cat([_panels(part) for part in parts], 2).flatten()


def _panels(part: Tensor) -> Tensor:
    """[N, G] -> bytes [N / 16, G, 16 elements]."""
    padded = functional.pad(part, (0, 0, 0, -part.shape[0] % _PANEL))
    panels = padded.view(-1, _PANEL, part.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.uint8)
