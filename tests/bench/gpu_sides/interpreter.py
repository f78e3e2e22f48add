"""Triton's interpreter with the arithmetic of a GPU; run as a program, a rank of an engine that has it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from quantd.engine.worker import serve


def as_on_a_gpu(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Give the interpreter dots whose rows know nothing of one another, and a bfloat16 that is a number.

    Its own dots leave the order of adding to a library, which takes it from a row's place among the others;
    they take the bits of a bfloat16 for an integer; and what becomes a bfloat16 is cut off, not rounded.
    These dots add in float64 and round once. replace: who does it, as a test's monkeypatch.setattr.
    """
    cast = InterpreterBuilder.cast_impl

    def dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> Any:
        exact = _numbers(a) @ _numbers(b) + d.data
        return TensorHandle(exact.astype(d.data.dtype), d.dtype.scalar)

    def rounding_cast(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return TensorHandle(bfloat16_bits(source.data), tl.bfloat16)
        return cast(self, source, dtype)

    replace(InterpreterBuilder, "create_dot", dot)
    replace(InterpreterBuilder, "cast_impl", rounding_cast)


def _numbers(handle: Any) -> Any:
    """float64."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)


def bfloat16_bits(values: Any) -> Any:
    """The bits, uint16, of float32 rounded half to even; a NaN stays one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded >> 16).astype(np.uint16)


if __name__ == "__main__":
    as_on_a_gpu()
    with np.errstate(all="ignore"):
        serve(int(sys.argv[1]))
