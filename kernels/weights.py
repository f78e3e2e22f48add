"""The one runtime weight layout: what every checkpoint format becomes before a backend packs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseWeight:
    """A plain matrix `values` [N, K] (fp16, bf16 or fp32): N outputs of K inputs."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        return self.values.float()


@dataclass(frozen=True)
class QuantizedWeight:
    """W[n, perm[k]] = scale[n, k // group_size] * codes[n, k] + offset[n, k // group_size].

    codes: uint8 [N, K], each below 2**bits. scale, offset: float32 [N, ceil(K / group_size)].
    perm: int64 [K] or None for the identity; column k of `codes` multiplies input `perm[k]`
    (act-order checkpoints, sorted so that groups are contiguous).
    input_bits: 8 where the checkpoint was made for inputs rounded to INT8 per token (W8A8), else None.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    group_size: int
    perm: Tensor | None = None
    input_bits: int | None = None

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        groups = -(-k // self.group_size)
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        assert self.scale.shape == (n, groups), (self.scale.shape, n, groups)
        assert self.offset.shape == (n, groups), (self.offset.shape, n, groups)
        assert self.scale.dtype == self.offset.dtype == torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """float32 [N, K] with columns in input order."""
        k = self.codes.shape[1]
        scale = self.scale.repeat_interleave(self.group_size, 1)[:, :k]
        offset = self.offset.repeat_interleave(self.group_size, 1)[:, :k]
        values = self.codes * scale + offset
        if self.perm is None:
            return values
        out = torch.empty_like(values)
        out[:, self.perm] = values
        return out


Weight = DenseWeight | QuantizedWeight
