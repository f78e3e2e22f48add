"""Rotation of queries and keys and the KV write: what lies between the QKV matrix and attention, as one
kernel. A norm of heads comes first where the model has one; rounding to INT8 comes last.

A program takes a few heads of one token. Nothing depends on the number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.kv_cache import page_strides
from quantd.kernels.gpu.rounding import round_half_even
from quantd.kernels.ops import AttentionInputs, HeadShape, KVLayer, QKNorm, RopeTable

_TILE_HEADS = 8  # of a program


@triton.jit
def _load(heads, d, is_head, LEN: tl.constexpr):
    """The LEN elements from `heads` on of each head, float32 [heads, a power of two], 0 behind them."""
    inside = is_head[:, None] & (d < LEN)[None, :]
    return tl.load(heads[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, inverse_rms, q_weight, k_weight, d, is_query, is_value, LEN: tl.constexpr):
    """Queries and keys times their weights over their root mean square; values as they are."""
    of_query = tl.load(q_weight + d, mask=d < LEN, other=0.0)[None, :]
    of_key = tl.load(k_weight + d, mask=d < LEN, other=0.0)[None, :]
    normed = x * inverse_rms[:, None] * tl.where(is_query[:, None], of_query, of_key)
    return tl.where(is_value[:, None], x, normed)


@triton.jit
def _codes(x, scale):
    """x in steps of `scale`, half to even; 0 where the scale is 0 or no number."""
    steps = round_half_even(tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None]))
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    return tl.where((scale > 0)[:, None], steps, 0.0)


@triton.jit
def _store(x, scale, q, pages, d, is_query, is_kept, LEN: tl.constexpr):
    """Queries to where q points, keys and values to their pages, as codes if there are scales."""
    is_element = (d < LEN)[None, :]
    at_query, at_page = q[:, None] + d[None, :], pages[:, None] + d[None, :]
    tl.store(at_query, x.to(q.dtype.element_ty), mask=is_query[:, None] & is_element)
    if scale is not None:
        x = _codes(x, scale)
    tl.store(at_page, x.to(pages.dtype.element_ty), mask=is_kept[:, None] & is_element)


@triton.jit(do_not_specialize_on_alignment=("positions", "slots"))
def _rope_kernel(
    qkv,
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    positions,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    block_stride,
    scale_block_stride,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """Grid (tokens, tiles of heads). A head is HALF elements, HALF that they turn with, and the rest.

    Scales: None for pages of floats. cos, sin: None where nothing turns. Weights: None without a norm.
    """
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    token = tl.program_id(0)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    i, j = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    at = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    left, right = _load(at, i, is_head, HALF), _load(at + HALF, i, is_head, HALF)
    rest = _load(at + 2 * HALF, j, is_head, REST)

    if q_weight is not None:
        total = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(rest * rest, 1)
        inverse_rms = tl.rsqrt(total * (1 / HEAD_DIM) + eps)
        left = _normed(left, inverse_rms, q_weight, k_weight, i, is_query, is_value, HALF)
        right = _normed(right, inverse_rms, q_weight + HALF, k_weight + HALF, i, is_query, is_value, HALF)
        rest = _normed(
            rest, inverse_rms, q_weight + 2 * HALF, k_weight + 2 * HALF, j, is_query, is_value, REST
        )
    if cos is not None:
        angle = tl.load(positions + token) * HALF + i
        c = tl.load(cos + angle, mask=i < HALF, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=i < HALF, other=0.0)[None, :]
        turned = left * c - right * s
        right = tl.where(is_value[:, None], right, right * c + left * s)
        left = tl.where(is_value[:, None], left, turned)

    slot = tl.load(slots + token)
    block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    kv_head = head - tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS)
    is_kept = is_head & (tl.minimum(kv_head, slot) >= 0)
    scale = None
    if k_scales is not None:
        top = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        top = tl.maximum(top, tl.max(tl.abs(rest), 1))
        # A sum tells of any element that is not finite, where a maximum may pass over NaN.
        zero = tl.sum(left * 0.0, 1) + tl.sum(right * 0.0, 1) + tl.sum(rest * 0.0, 1)
        scale = tl.div_rn(top, 127.0) + zero
        at_scale = block * scale_block_stride + kv_head * SCALE_HEAD_STRIDE + offset
        tl.store(tl.where(is_value, v_scales, k_scales) + at_scale, scale, mask=is_kept)
    to_query = q + (token * NUM_HEADS + head) * HEAD_DIM
    to_page = tl.where(is_value, v_pages, k_pages) + block * block_stride
    to_page += kv_head * HEAD_STRIDE + offset * TOKEN_STRIDE
    _store(left, scale, to_query, to_page, i, is_query, is_kept, HALF)
    _store(right, scale, to_query + HALF, to_page + HALF, i, is_query, is_kept, HALF)
    _store(rest, scale, to_query + 2 * HALF, to_page + 2 * HALF, j, is_query, is_kept, REST)


def rope_kv_write(
    qkv: Tensor,
    heads: HeadShape,
    inputs: AttentionInputs,
    layer: KVLayer,
    rope: RopeTable | None,
    qk_norm: QKNorm | None = None,
) -> Tensor:
    """qkv [M, (num_heads + 2 num_kv_heads) * D] -> rotated queries [M, num_heads * D] in its type.

    See `Ops.rope_kv_write`. A token with a negative slot, as a recorded step has where it holds fewer
    tokens, is written nowhere. A vector that is not finite has a scale of NaN and codes of 0.
    """
    assert qkv.is_contiguous() and qkv.shape[1] == _num_vectors(heads) * heads.head_dim, qkv.shape
    assert rope is None or (rope.cos.is_contiguous() and rope.sin.is_contiguous())
    q = torch.empty(len(qkv), heads.num_heads * heads.head_dim, dtype=qkv.dtype, device=qkv.device)
    if len(qkv) == 0:
        return q
    rotary_dim = 2 * rope.cos.shape[1] if rope else 0
    _rope_kernel[(len(qkv), triton.cdiv(_num_vectors(heads), _TILE_HEADS))](
        qkv=qkv,
        q=q,
        k_pages=layer.k,
        v_pages=layer.v,
        k_scales=layer.k_scale,
        v_scales=layer.v_scale,
        positions=inputs.positions,
        slots=inputs.slots,
        cos=rope.cos if rope else None,
        sin=rope.sin if rope else None,
        q_weight=qk_norm.q_weight if qk_norm else None,
        k_weight=qk_norm.k_weight if qk_norm else None,
        eps=qk_norm.eps if qk_norm else 0.0,
        **page_strides(layer),
        **_head_constants(heads, rotary_dim),
        num_warps=_num_warps(heads, rotary_dim),
    )
    return q


def _num_vectors(heads: HeadShape) -> int:
    return heads.num_heads + 2 * heads.num_kv_heads


def _head_constants(heads: HeadShape, rotary_dim: int) -> dict[str, int]:
    """rotary_dim 0: nothing turns, and the halves are those of the head."""
    half = (rotary_dim or heads.head_dim) // 2
    rest = heads.head_dim - 2 * half
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "HALF": half,
        "HALF_BLOCK": triton.next_power_of_2(half),
        "REST_BLOCK": triton.next_power_of_2(max(rest, 1)),
        "TILE_HEADS": _TILE_HEADS,
    }


def _num_warps(heads: HeadShape, rotary_dim: int) -> int:
    """So many that a thread has eight elements of each half, one load."""
    half_block = _head_constants(heads, rotary_dim)["HALF_BLOCK"]
    return min(max(_TILE_HEADS * half_block // 256, 1), 4)
