"""The C library as Python sees it: abi.h field by field, and the thread pool that runs ops."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

from quantd.kernels.huge_pages import Arena


class Kind(IntEnum):
    """enum qd_kind."""

    PACK = 0
    EMBEDDING = 1
    NORM = 2
    LINEAR = 3
    GLU = 4
    COPY = 5
    ROPE = 6
    ATTENTION = 7
    SHORTLIST = 8


class Header(IntEnum):
    """enum qd_header."""

    HALF = 0
    HALF_ZERO = 1
    FLOAT = 2
    FLOAT_ZERO = 3


class Inputs(IntEnum):
    """enum qd_inputs."""

    FLOAT = 0
    INT8_BLOCKS = 1
    INT8_ROWS = 2


class Step(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("max_blocks", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", c_void_p),
    )


class Weight(Structure):
    _fields_ = (
        ("n", c_int64),
        ("k", c_int64),
        ("group", c_int64),
        ("bits", c_int32),
        ("header", c_int32),
        ("inputs", c_int32),
        ("codes", c_void_p),
        ("headers", c_void_p),
        ("bias", c_void_p),
        ("perm", c_void_p),
    )


class PackArgs(Structure):
    _fields_ = (("target", POINTER(Weight)), ("source", c_void_p))


class EmbeddingArgs(Structure):
    _fields_ = (("weight", POINTER(Weight)), ("out", c_void_p), ("scale", c_float))


class NormArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("sum", c_void_p),
        ("width", c_int64),
        ("eps", c_float),
        ("scale", c_float),
    )


class GluArgs(Structure):
    _fields_ = (("gate_up", c_void_p), ("out", c_void_p), ("width", c_int64), ("activation", c_int32))


class CopyArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("out_width", c_int64),
        ("column", c_int64),
    )


class LinearArgs(Structure):
    _fields_ = (
        ("weight", POINTER(Weight)),
        ("x", c_void_p),
        ("out", c_void_p),
        ("norm", POINTER(NormArgs)),
        ("glu", POINTER(GluArgs)),
        ("scale", c_float),
        ("softcap", c_float),
        ("fine", c_int32),
    )


class KV(Structure):
    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("k_stride", c_int64 * 3),
        ("v_stride", c_int64 * 3),
        ("k_scale_stride", c_int64 * 3),
        ("v_scale_stride", c_int64 * 3),
        ("block_size", c_int64),
        ("type", c_int32),
    )


class Heads(Structure):
    _fields_ = (("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64))


class RopeArgs(Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("out", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("kv", POINTER(KV)),
        ("heads", Heads),
        ("rotary_dim", c_int64),
        ("eps", c_float),
    )


class AttentionArgs(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("kv", POINTER(KV)),
        ("heads", Heads),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("int8_queries", c_int32),
    )


class Shortlist(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("mask", c_void_p),
        ("tail", c_double),
        ("total", c_double),
        ("top_k", c_int64),
        ("weights", c_void_p),
        ("ids", c_void_p),
        ("temperature", c_float),
        ("min_weight", c_float),
        ("largest", c_float),
        ("best", c_int32),
        ("finite", c_int32),
        ("count", c_int32),
    )


class ShortlistArgs(Structure):
    _fields_ = (
        ("lists", POINTER(Shortlist)),
        ("num_lists", c_int64),
        ("vocab_size", c_int64),
        ("capacity", c_int64),
    )


class Op(Structure):
    _fields_ = (("kind", c_int64), ("args", c_void_p))


class Library:
    """The loaded library with threads of its own. Not for several callers at a time.

    name: the file's, which tells what it was built of. arena: memory for packed weights.
    """

    def __init__(self, path: Path, threads: int) -> None:
        """Raises OSError where the file does not load or threads cannot be had."""
        self._functions = ctypes.CDLL(str(path))
        self._declare()
        self.name = path.stem
        self.path_name = str(self._functions.qd_path_name(), "ascii")
        self.arena = Arena()
        self._pool = self._functions.qd_pool_create(threads)
        if not self._pool:
            raise OSError(f"no {threads} threads")

    def _declare(self) -> None:
        lib = self._functions
        lib.qd_path_name.restype = c_char_p
        lib.qd_pool_create.argtypes, lib.qd_pool_create.restype = [c_int32], c_void_p
        lib.qd_pool_destroy.argtypes, lib.qd_pool_destroy.restype = [c_void_p], None
        lib.qd_run.argtypes = [c_void_p, c_void_p, c_int64, POINTER(Step)]
        lib.qd_run.restype = c_int32

    def run(self, ops: ctypes.Array[Op] | Sequence[Op], step: Step) -> None:
        """Run an array of ops in order. Raises MemoryError."""
        array = ops if isinstance(ops, ctypes.Array) else (Op * len(ops))(*ops)
        if self._functions.qd_run(self._pool, array, len(array), step):
            raise MemoryError("no memory for the scratch of a step")

    def close(self) -> None:
        """Stop the threads. Nothing may be run afterwards."""
        pool, self._pool = self._pool, None
        if pool:
            self._functions.qd_pool_destroy(pool)

    def __del__(self) -> None:
        if getattr(self, "_pool", None):
            self.close()
