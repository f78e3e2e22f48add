"""Making one matrix of several over the same inputs, where their formats are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight


@dataclass(frozen=True)
class Piece:
    """A weight [N, K] with its bias, float32 [N]."""

    weight: Weight
    bias: Tensor | None


def join_alike(pieces: Sequence[Piece]) -> list[Piece]:
    """Each run of alike neighbours as one piece, outputs in order."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and _alike(runs[-1][-1].weight, piece.weight):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_join(run) for run in runs]


def equal(a: Weight, b: Weight) -> bool:
    """Whether two plain weights are the same; never so where one is quantized."""
    if not (isinstance(a, DenseWeight) and isinstance(b, DenseWeight)):
        return False
    return a.values.dtype == b.values.dtype and torch.equal(a.values, b.values)


def _alike(a: Weight, b: Weight) -> bool:
    if isinstance(a, DenseWeight) and isinstance(b, DenseWeight):
        return a.values.dtype == b.values.dtype
    if isinstance(a, QuantizedWeight) and isinstance(b, QuantizedWeight):
        formats = [(weight.bits, weight.group_size, weight.input_bits) for weight in (a, b)]
        return formats[0] == formats[1] and _same_order(a.perm, b.perm)
    return False


def _same_order(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _join(run: list[Piece]) -> Piece:
    first = run[0]
    return (
        first if len(run) == 1 else Piece(_join_weights([piece.weight for piece in run]), _join_biases(run))
    )


def _join_weights(weights: list[Weight]) -> Weight:
    first = weights[0]
    if isinstance(first, DenseWeight):
        return DenseWeight(torch.cat([w.values for w in weights if isinstance(w, DenseWeight)]))
    quantized = [w for w in weights if isinstance(w, QuantizedWeight)]
    return replace(
        first,
        codes=torch.cat([w.codes for w in quantized]),
        scale=torch.cat([w.scale for w in quantized]),
        offset=torch.cat([w.offset for w in quantized]),
    )


def _join_biases(run: list[Piece]) -> Tensor | None:
    if all(piece.bias is None for piece in run):
        return None
    return torch.cat(
        [torch.zeros(piece.weight.shape[0]) if piece.bias is None else piece.bias for piece in run]
    )
