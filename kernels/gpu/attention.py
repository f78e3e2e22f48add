"""Attention over the block pool: what its kernels are launched with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import e, log2
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.attention_kernels import attention_kernel, merge_kernel
from quantd.kernels.gpu.attention_plan import Launch, Tiling, max_registers, num_warps_for, plan, tiling_for
from quantd.kernels.gpu.kv_cache import page_strides
from quantd.kernels.gpu.tuning import gpu_of
from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer

# Block numbers are read two tiles ahead, so that keys and values can be read one ahead.
_NUM_STAGES = 3


def attention(
    q: Tensor,
    heads: HeadShape,
    inputs: AttentionInputs,
    layer: KVLayer,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
    launches: Sequence[Launch] | None = None,
) -> Tensor:
    """Causal attention of q [M, num_heads * D] over the pool -> [M, num_heads * D] in q's type.

    See `Ops.attention`. D <= 256, and with INT8 codes a multiple of 4. Programs and scratch hang on the
    shapes of `inputs` alone, so the call can be recorded in a CUDA graph; rows of no request are left
    as memory had them. tiling, launches: others than this GPU and the step would have.
    """
    assert q.is_contiguous() and q.shape[1] == heads.num_heads * heads.head_dim, q.shape
    assert inputs.block_tables.is_contiguous() and heads.head_dim <= 256
    dim, gpu = _padded(heads.head_dim), gpu_of(q.device)
    value_bytes = layer.k.dtype.itemsize
    tiling = tiling or tiling_for(dim, gpu, value_bytes)
    num_splits = -(-inputs.block_tables.shape[1] * layer.k.shape[2] // tiling.split_len)
    if launches is None:
        launches = plan(len(q), len(inputs.context_len), num_splits, heads, gpu)
    out, layer = torch.empty(q.shape, dtype=q.dtype, device=q.device), _words(layer)
    arguments = {
        "q": q,
        "out": out,
        "k": layer.k,
        "v": layer.v,
        "k_scale": layer.k_scale,
        "v_scale": layer.v_scale,
        "positions": inputs.positions,
        "query_start": inputs.query_start,
        "block_tables": inputs.block_tables,
        "num_requests": len(inputs.context_len),
        "table_width": inputs.block_tables.shape[1],
        "num_kv_heads": heads.num_kv_heads,
        "scale": scale * log2(e) * (2 / softcap if softcap else 1),
        "softcap": softcap * log2(e),
        "window": window,
        "INT8": layer.k_scale is not None,
        "PAIRS": gpu.has_dots,
        **page_strides(layer),
        **_constants(heads, tiling, _dot_type(q, layer), softcap > 0, window > 0),
    }
    for launch in launches:
        num_warps = num_warps_for(launch, dim, gpu, value_bytes)
        _run(launch, num_splits, heads, arguments, num_warps, max_registers(launch, dim, num_warps))
    return out


def _padded(head_dim: int) -> int:
    return max(1 << (head_dim - 1).bit_length(), 16)


def _words(layer: KVLayer) -> KVLayer:
    """The layer with four INT8 codes to an int32."""
    if layer.k_scale is None:
        return layer
    return replace(layer, k=layer.k.view(torch.int32), v=layer.v.view(torch.int32))


def _dot_type(q: Tensor, layer: KVLayer) -> tl.dtype:
    """Of the factors of dots: bf16 where the pool's values need its range; else fp16, which is finer.

    fp16 holds INT8 codes exactly, and weights and queries better than bf16 does.
    """
    if q.dtype == torch.float32:
        return tl.float32
    is_wide = layer.k.dtype in (torch.bfloat16, torch.float32)
    return tl.bfloat16 if is_wide and q.dtype == torch.bfloat16 else tl.float16


def _constants(
    heads: HeadShape, tiling: Tiling, dot_type: tl.dtype, has_softcap: bool, has_window: bool
) -> dict[str, object]:
    assert tiling.split_len % tiling.tile_len == 0, tiling
    return {
        "GROUP": heads.num_heads // heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "DIM": _padded(heads.head_dim),
        "TILE_LEN": tiling.tile_len,
        "SPLIT_LEN": tiling.split_len,
        "DOT": dot_type,
        "HAS_SOFTCAP": has_softcap,
        "HAS_WINDOW": has_window,
    }


def _run(
    launch: Launch,
    num_splits: int,
    heads: HeadShape,
    arguments: Mapping[str, Any],
    num_warps: int,
    max_registers: int | None,
) -> None:
    """A launch, in as many turns as its scratch asks for."""
    grid = (launch.num_tiles, heads.num_kv_heads, launch.num_programs)
    scratch = _scratch(launch, heads, arguments["q"].device)
    for first in range(0, num_splits, launch.num_splits):
        turn = {
            **arguments,
            **scratch,
            "min_len": launch.share.min_len,
            "max_len": launch.share.max_len,
            "first_split": first,
            "num_splits": launch.num_splits,
            "splits_per_program": launch.splits_per_program,
            "TILE_ROWS": launch.tile_rows,
            "DIRECT": launch.direct,
            "IS_FIRST": first == 0,
            "IS_LAST": first + launch.num_splits >= num_splits,
        }
        _start(attention_kernel, grid, turn, num_warps, max_registers)
        if not launch.direct:
            _start(merge_kernel, (launch.share.max_tokens, heads.num_heads), turn, num_warps=1)


def _scratch(launch: Launch, heads: HeadShape, device: torch.device) -> dict[str, Tensor | None]:
    """Partial results of each row, head and split, and what earlier turns have added up."""
    if launch.direct:
        return {"partial": None, "partial_sums": None}
    shape = (launch.share.max_tokens, heads.num_heads, 1 + launch.num_splits)
    return {
        "partial": torch.empty(*shape, heads.head_dim, device=device),
        "partial_sums": torch.empty(*shape, 2, device=device),
    }


def _start(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    num_warps: int,
    max_registers: int | None = None,
) -> None:
    arguments = {name: arguments[name] for name in kernel.arg_names}
    kernel[grid](**arguments, num_warps=num_warps, num_stages=_NUM_STAGES, maxnreg=max_registers)
