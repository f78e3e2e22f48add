"""Rounding inside kernels, the same in each: to whole numbers, and rows to INT8 by the rule of W8A8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_half_even(x):
    """x, below 2**22, without its fraction, which a larger number pushes out."""
    return (x + 1.5 * 2**23) - 1.5 * 2**23


@triton.jit
def row_scale(largest):
    """The scale of a row whose largest |x| that is, by the rule of `kernels.reference.rounded_inputs`."""
    return tl.maximum(tl.div_rn(largest, 127.5), 2.0**-23)


@triton.jit
def row_codes(x, scale):
    """int8 of float32 x by the same rule."""
    steps = round_half_even(tl.div_rn(x, scale + tl.zeros_like(x)))
    return tl.minimum(tl.maximum(steps, -128.0), 127.0).to(tl.int8)
