"""What each kernel is launched with, so that it can be compiled where there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelSpec:
    """A kernel in one configuration that is launched.

    name: unique, such as "attention int8 d128". kernel: the @triton.jit function. signature: type of each
    argument that is no constant, "*fp16", "*i8", "*fp32", "*i32", "i32", "fp32". constants: values of the
    constexpr ones. has_dot: must show tensor-core instructions from sm_80 up. min_capability: the lowest
    target it is launched on, 75 for sm_75. divisible_16: arguments known to be multiples of 16
    (pointers: aligned to 16 bytes).
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    has_dot: bool = False
    min_capability: int = 75
    divisible_16: tuple[str, ...] = ()
