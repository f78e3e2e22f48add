"""Linear layers, logits and embeddings on packed weights: which kernel, by rows, GPU and what is promised.

| rows | quantized | plain |
|---|---|---|
| to 128 | tiled.py | vendor's product |
| above | dequantized, vendor's product | vendor's product |
| any, same bits | tiled.py | tiled.py |
| any, logits | tiled.py | tiled.py |
| any, INT8 inputs | tiled.py | |

On sm_75, which Triton gives no tensor-core products, logits as any other product:

| rows | quantized | plain |
|---|---|---|
| to 24 | gemv.py | vendor's product |
| above | dequantized, vendor's product | vendor's product |
| any, same bits | gemv.py | gemv.py |
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from quantd.kernels.gpu.dequantize import dequantize
from quantd.kernels.gpu.gemv import gemv
from quantd.kernels.gpu.inputs import Inputs, prepare, prepare_rounded
from quantd.kernels.gpu.norm import Rounded
from quantd.kernels.gpu.split_k import Finish
from quantd.kernels.gpu.tiled import matmul, shape_of
from quantd.kernels.gpu.tuning import Tile, Tuning, search, with_plan
from quantd.kernels.gpu.weights import STRIP, GpuWeight, Kind

_TILED_ROWS = 128
# Counted, at 4 bits: 24 rows are 3.8 ps of arithmetic a weight on an RTX 2080 Ti, at its peak, 6.3 on a T4;
# to read half a byte, write two and read them again takes 7.3 and 14.1. It may fall to half of that peak.
_GEMV_ROWS = 24
_WORKSPACE_BYTES = 32 << 20  # of dequantized weights at a time; much of it stays in a GPU's L2 cache


def linear(x: Tensor, weight: GpuWeight, tuning: Tuning, same_bits: bool = False) -> Tensor:
    """x [M, K] @ W.T + bias -> [M, N], both in compute dtype.

    same_bits: a row's bits do not depend on M. Without it they do not for quantized weights up to 128 rows,
    on sm_75 up to 24; elsewhere the vendor's product is fast and promises nothing.
    """
    return _product(prepare(x, weight), weight, Finish(x.dtype), tuning, same_bits)


def linear_rounded(
    rounded: Rounded, weight: GpuWeight, dtype: torch.dtype, tuning: Tuning, same_bits: bool = False
) -> Tensor:
    """`linear` of rows that the norm before has rounded to INT8, for a weight that asks for that."""
    assert weight.rounds_inputs
    inputs = prepare_rounded(rounded, weight, dtype)
    return _product(inputs, weight, Finish(dtype), tuning, same_bits)


def logits(
    x: Tensor,
    weight: GpuWeight,
    tuning: Tuning,
    scale: float = 1.0,
    softcap: float = 0.0,
    same_bits: bool = False,
) -> Tensor:
    """linear(x) * scale, then softcap * tanh(. / softcap) where softcap > 0 -> float32 [M, N].

    The same bits for any M, unasked where there are tensor-core products.
    """
    how = Finish(torch.float32, True, scale, softcap)
    return _product(prepare(x, weight), weight, how, tuning, same_bits or tuning.gpu.has_dots)


def _product(inputs: Inputs, weight: GpuWeight, how: Finish, tuning: Tuning, same_bits: bool) -> Tensor:
    num_rows = len(inputs.values)
    if num_rows == 0:
        return torch.empty(0, weight.shape[0], dtype=how.dtype, device=inputs.values.device)
    plan = tuning.plan(shape_of(weight, inputs.values.dtype))
    if not tuning.gpu.has_dots:
        if same_bits or (weight.kind is Kind.PACKED and num_rows <= _GEMV_ROWS):
            return gemv(inputs, weight, how, plan.splits)
        return _vendor(inputs, weight, how)
    if same_bits or weight.kind is Kind.INT8 or (weight.kind is Kind.PACKED and num_rows <= _TILED_ROWS):
        return matmul(inputs, weight, how, plan.splits, plan.tile(num_rows), tuning.gpu)
    return _vendor(inputs, weight, how)


def _vendor(inputs: Inputs, weight: GpuWeight, how: Finish) -> Tensor:
    """The vendor's product with a plain matrix, or with a dequantized one, a bounded part of it at a time."""
    x = inputs.values
    out = torch.empty(len(x), weight.shape[0], dtype=how.dtype, device=x.device)
    for first, last in _parts(weight, x.dtype):
        bias = None if weight.bias is None else weight.bias[first:last]
        _multiply(x, _matrix(weight, first, last, x.dtype), bias, out[:, first:last])
    if not how.logits:
        return out
    out *= how.factor
    return how.softcap * torch.tanh(out / how.softcap) if how.softcap > 0 else out


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ matrix.T + bias, of a matrix in x's type, which a GPU reads as it is for any type of out."""
    if out.dtype != x.dtype:
        # On a CPU, for the interpreter, torch has no such product.
        out.copy_(torch.mm(x, matrix.T, out_dtype=out.dtype) if x.is_cuda else x.float() @ matrix.T.float())
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(x, matrix.T, out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, matrix.T, out=out)


def _parts(weight: GpuWeight, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Outputs [first, last) of each part; all at once where the matrix is there already."""
    n = weight.shape[0]
    if weight.kind is Kind.DENSE and weight.low.dtype == dtype:
        step = n
    else:
        step = max(_WORKSPACE_BYTES // (weight.padded_k * dtype.itemsize) // STRIP, 1) * STRIP
    yield from ((first, min(first + step, n)) for first in range(0, n, step))


def _matrix(weight: GpuWeight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    if weight.kind is Kind.DENSE:
        return weight.low[first:last].to(dtype)
    return dequantize(weight, first, last - first, dtype)


def tune(weight: GpuWeight, dtype: torch.dtype, tuning: Tuning) -> Tuning:
    """Time products with a weight on its GPU, for half a minute, and add the best plan to `tuning`.

    Without tensor-core products no tile is ever launched, so any will do.
    """

    def measure(num_rows: int, splits: int, tile: Tile) -> float:
        x = torch.randn(num_rows, weight.shape[1], dtype=dtype, device=weight.low.device)
        inputs, how = prepare(x, weight), Finish(dtype)
        if not tuning.gpu.has_dots:
            return float(do_bench(lambda: gemv(inputs, weight, how, splits)))
        try:
            return float(do_bench(lambda: matmul(inputs, weight, how, splits, tile, tuning.gpu)))
        except OutOfResources:
            return math.inf

    shape = shape_of(weight, dtype)
    return with_plan(tuning, shape, search(shape, tuning.gpu, measure))
