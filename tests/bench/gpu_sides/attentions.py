"""Attention: decode against what reading the cache takes, prefill against torch's SDPA in its type."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sides.report import Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_sides.pools import new_pool, pool_bytes, step
from gpu_sides.setup import Measure, Setup, peer_seconds
from gpu_sides.timing import Call
from quantd.kernels.gpu.attention import attention
from quantd.kernels.ops import AttentionInputs, HeadShape

GOAL = 0.7
GOAL_BYTES = 64 << 20
"""The goal is one of bandwidth, so it counts where there is so much to read."""
_LONG_QUERY = 4  # tokens of a request, as when drafts are verified
_MAX_PEER_BYTES = 8 << 30


def attentions(setup: Setup) -> Iterator[Measure]:
    """Decode over INT8 at every size, then its variants, then prefill."""
    sizes = setup.sizes
    heads, most = sizes.small.heads, max(sizes.batches)
    cases = [(batch, context) for context in sizes.contexts for batch in sizes.batches]
    for batch, context in cases:
        yield _decode(setup, "INT8 KV", "int8", heads, batch, context)
    yield _decode(setup, f"{setup.type_name} KV", setup.type_name, heads, most, sizes.contexts[0])
    yield _decode(setup, "INT8 KV", "int8", sizes.large.heads, most, sizes.contexts[0])
    yield _decode(setup, "INT8 KV", "int8", heads, most, sizes.contexts[0], _LONG_QUERY)
    for context in (sizes.prefill, *sizes.contexts[1:]):
        yield _prefill(setup, heads, context)


def _decode(
    setup: Setup, label: str, format: str, heads: HeadShape, batch: int, context: int, query_len: int = 1
) -> Measure:
    name = f"attention, {label}, {_heads(heads)}, {batch} x {context} tokens"
    name += f", {query_len} new each" if query_len > 1 else ""
    return Measure(name, lambda: _decode_row(setup, name, format, heads, batch, context, query_len))


def _decode_row(
    setup: Setup, name: str, format: str, heads: HeadShape, batch: int, context: int, query_len: int
) -> Row:
    num_bytes = pool_bytes(format, heads, 1, batch * context)
    copies = setup.timer.copies(num_bytes)
    setup.need(copies * num_bytes + _peer_bytes(heads, batch, context))
    pool = new_pool(format, heads, copies, batch * (context + 16), setup.device)
    inputs = step([(context - query_len, context)] * batch, setup.device)
    q = _random(setup, batch * query_len, heads.num_heads * heads.head_dim)
    scale = heads.head_dim**-0.5
    calls: list[Call] = [partial(attention, q, heads, inputs, layer, scale) for layer in pool.layers()]
    is_wide = format == "int8" and query_len == 1 and num_bytes >= GOAL_BYTES
    note = _sdpa_note(setup, heads, batch, context) if query_len == 1 else ""
    return setup.of_bandwidth(name, num_bytes + 2 * q.nbytes, calls, GOAL if is_wide else None, note)


def _peer_bytes(heads: HeadShape, batch: int, context: int) -> int:
    size = 4 * batch * context * heads.num_kv_heads * heads.head_dim
    return size if size <= _MAX_PEER_BYTES else 0


def _sdpa_note(setup: Setup, heads: HeadShape, batch: int, context: int) -> str:
    """torch's decode over a cache in one piece, in 16 bits: twice the bytes."""
    if not _peer_bytes(heads, batch, context):
        return ""
    q = _random(setup, batch, heads.num_heads, 1, heads.head_dim)
    k, v = (_random(setup, batch, heads.num_kv_heads, context, heads.head_dim) for _ in range(2))
    call = partial(scaled_dot_product_attention, q, k, v, enable_gqa=True)
    seconds = peer_seconds(setup.timer, [call])
    return "" if seconds is None else f"torch SDPA, {setup.type_name} {seconds * 1e6:.1f} µs"


def _prefill(setup: Setup, heads: HeadShape, context: int) -> Measure:
    name = f"attention, INT8 KV, {_heads(heads)}, prompt of {context} tokens at once"
    return Measure(name, lambda: _prefill_row(setup, name, heads, context))


def _prefill_row(setup: Setup, name: str, heads: HeadShape, context: int) -> Row:
    layer = new_pool("int8", heads, 1, context + 16, setup.device).layers()[0]
    inputs: AttentionInputs = step([(0, context)], setup.device)
    q = _random(setup, context, heads.num_heads * heads.head_dim)
    call = partial(attention, q, heads, inputs, layer, heads.head_dim**-0.5)
    ours = setup.timer.seconds([call], recorded=False)
    theirs = _sdpa_prefill(setup, heads, context)
    work = 2 * context * context * heads.num_heads * heads.head_dim / 1e12
    note = f"{ours * 1e3:.2f} ms"
    return Row(
        name,
        "TFLOP/s",
        work / ours,
        None,
        theirs and work / theirs,
        f"torch SDPA, {setup.type_name}",
        note=note,
    )


def _sdpa_prefill(setup: Setup, heads: HeadShape, context: int) -> float | None:
    q = _random(setup, 1, heads.num_heads, context, heads.head_dim)
    k, v = (_random(setup, 1, heads.num_kv_heads, context, heads.head_dim) for _ in range(2))
    call = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    return peer_seconds(setup.timer, [call], recorded=False)


def _random(setup: Setup, *shape: int) -> Tensor:
    return torch.randn(shape, device=setup.device, dtype=setup.dtype)


def _heads(heads: HeadShape) -> str:
    return f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}"
