"""Rotary position tables: a base, how many elements of a head turn, and one of six ways to stretch it.

A table is fixed for the served length, so what a token sees never depends on when it was computed.
The arithmetic is float32 in the order of Hugging Face transformers (modeling_rope_utils), since that
is what models were trained and judged with. Lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quantd.kernels.ops import RopeTable
from quantd.quant.errors import CheckpointError, UnsupportedModelError


class RopeScaling(Protocol):
    """A way to stretch rotary positions."""

    def frequencies(self, base: float, dim: int, max_model_len: int) -> Tensor:
        """Radians a position: float32 [dim / 2] for a served length."""

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""

    @property
    def max_len(self) -> int:
        """The longest context that the scaling was made for."""


@dataclass(frozen=True)
class RopeSpec:
    """A rotary table as numbers: rotary_dim elements of each head, at base ** (-2 i / rotary_dim)."""

    base: float
    rotary_dim: int
    scaling: RopeScaling


def rope_table(spec: RopeSpec, max_model_len: int) -> RopeTable:
    """Cosines and sines of positions 0 .. max_model_len - 1."""
    frequencies = spec.scaling.frequencies(spec.base, spec.rotary_dim, max_model_len)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    factor = spec.scaling.attention_factor
    return RopeTable(angles.cos() * factor, angles.sin() * factor)


def rope_scaling(parameters: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling:
    """Read the scaling of a config's rope_scaling (transformers 4) or rope_parameters (5).

    Raises UnsupportedModelError for a rope_type that quantd does not have, CheckpointError where
    a parameter that the type needs is missing.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS:
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported (have: {', '.join(_KINDS)})")
    try:
        return _KINDS[kind](parameters, max_position_embeddings)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rope_type {kind!r}, value missing or bad: {error}") from error


def _powers(base: float, dim: int) -> Tensor:
    exponents: Tensor = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return torch.pow(base, exponents)


@dataclass(frozen=True)
class Unscaled:
    """Plain rotary embedding (arXiv 2104.09864)."""

    max_len: int
    attention_factor: float = 1.0

    def frequencies(self, base: float, dim: int, max_model_len: int) -> Tensor:
        return 1.0 / _powers(base, dim)


@dataclass(frozen=True)
class Linear:
    """Position interpolation: every frequency divided by a factor (arXiv 2306.15595)."""

    factor: float
    max_len: int
    attention_factor: float = 1.0

    def frequencies(self, base: float, dim: int, max_model_len: int) -> Tensor:
        return 1.0 / _powers(base, dim) / self.factor


@dataclass(frozen=True)
class Dynamic:
    """NTK-aware scaling: the base grows with the served length once it is beyond the trained one."""

    factor: float
    trained_len: int
    attention_factor: float = 1.0

    @property
    def max_len(self) -> int:
        return int(self.trained_len * self.factor)

    def frequencies(self, base: float, dim: int, max_model_len: int) -> Tensor:
        length = max(max_model_len, self.trained_len)
        growth = self.factor * length / self.trained_len - (self.factor - 1)
        return 1.0 / _powers(base * growth ** (dim / (dim - 2)), dim)


@dataclass(frozen=True)
class Yarn:
    """YaRN: slow frequencies interpolated, fast ones kept, a ramp between (arXiv 2309.00071)."""

    factor: float
    trained_len: int
    max_len: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    def frequencies(self, base: float, dim: int, max_model_len: int) -> Tensor:
        low, high = self._ramp_ends(base, dim)
        ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        kept = 1 - ramp.clamp(0, 1)
        powers = _powers(base, dim)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _ramp_ends(self, base: float, dim: int) -> tuple[float, float]:
        """The elements that turn beta_fast and beta_slow times over the trained length."""
        low, high = (
            dim * math.log(self.trained_len / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: frequencies slower than a wavelength divided, faster than another kept, blended between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_len: int
    max_len: int
    attention_factor: float = 1.0

    def frequencies(self, base: float, dim: int, max_model_len: int) -> Tensor:
        plain = 1.0 / _powers(base, dim)
        turns = self.trained_len / (2 * math.pi / plain)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * plain / self.factor + blend * plain


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: a searched factor for each frequency (arXiv 2402.13753).

    The long set serves every position as soon as the served length is beyond the trained one.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    trained_len: int
    max_len: int
    attention_factor: float

    def frequencies(self, base: float, dim: int, max_model_len: int) -> Tensor:
        factors = self.long_factors if max_model_len > self.trained_len else self.short_factors
        if len(factors) != dim // 2:
            raise CheckpointError(
                f"config.json: longrope has {len(factors)} factors, a head needs {dim // 2}"
            )
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(base, dim))


def _linear(parameters: Mapping[str, Any], max_len: int) -> RopeScaling:
    factor = float(parameters["factor"])
    return Linear(factor, int(max_len * factor))


def _dynamic(parameters: Mapping[str, Any], max_len: int) -> RopeScaling:
    return Dynamic(float(parameters["factor"]), max_len)


def _llama3(parameters: Mapping[str, Any], max_len: int) -> RopeScaling:
    return Llama3(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        trained_len=_trained_len(parameters, max_len),
        max_len=max_len,
    )


def _yarn(parameters: Mapping[str, Any], max_len: int) -> RopeScaling:
    trained_len = _trained_len(parameters, max_len)
    factor = float(parameters.get("factor") or max_len / trained_len)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    elif attention_factor is None:
        attention_factor = _yarn_mscale(factor, 1.0)
    return Yarn(
        factor=factor,
        trained_len=trained_len,
        max_len=max(max_len, int(trained_len * factor)),
        attention_factor=float(attention_factor),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=bool(parameters.get("truncate", True)),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(parameters: Mapping[str, Any], max_len: int) -> RopeScaling:
    trained_len = _trained_len(parameters, max_len)
    factor = float(parameters.get("factor") or max_len / trained_len)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained_len)) if factor > 1 else 1.0
    return LongRope(
        short_factors=tuple(map(float, parameters["short_factor"])),
        long_factors=tuple(map(float, parameters["long_factor"])),
        trained_len=trained_len,
        max_len=max_len,
        attention_factor=float(attention_factor),
    )


def _trained_len(parameters: Mapping[str, Any], max_len: int) -> int:
    return int(parameters.get("original_max_position_embeddings") or max_len)


_KINDS: Mapping[str, Callable[[Mapping[str, Any], int], RopeScaling]] = {
    "default": lambda parameters, max_len: Unscaled(max_len),
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
