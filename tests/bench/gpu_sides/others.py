"""Everything that works a row at a time, against what moving its bytes takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sides.report import Row
from torch import Tensor

from gpu_sides.pools import BLOCK_SIZE, new_pool, step
from gpu_sides.products import random_weight
from gpu_sides.setup import Measure, Setup
from gpu_sides.timing import Call
from quantd.kernels.gpu.activation import glu
from quantd.kernels.gpu.dequantize import dequantize, embedding
from quantd.kernels.gpu.kv_cache import copy_blocks, gather_blocks
from quantd.kernels.gpu.norm import add_rms_norm, add_rms_norm_rounded, rms_norm
from quantd.kernels.gpu.rope import rope_kv_write
from quantd.kernels.gpu.sampling import sample
from quantd.kernels.gpu.sampling_inputs import Draw, SamplingInputs
from quantd.kernels.ops import RopeTable

GOAL = 0.8


def others(setup: Setup) -> Iterator[Measure]:
    """Those that the goals name come first."""
    tokens = setup.sizes.tokens
    for width in setup.sizes.widths:
        yield _named(f"rms_norm, {tokens} x {width}", partial(_norm, setup, width))
        yield _named(f"add_rms_norm, {tokens} x {width}", partial(_add_norm, setup, width))
    for format in ("int8", setup.type_name):
        yield _named(f"rope and KV write, {format}, {tokens} tokens", partial(_kv_write, setup, format))
    width = max(setup.sizes.widths)
    yield _named(f"add_rms_norm rounded to INT8, {tokens} x {width}", partial(_rounded_norm, setup, width))
    yield _named(f"silu and multiply, {tokens} tokens", partial(_glu, setup))
    yield _named("weights of 4 bit dequantized", partial(_dequantize, setup))
    yield _named(f"embedding of 4 bit, {tokens} tokens", partial(_embedding, setup))
    yield _named("blocks copied within the pool", partial(_copy, setup))
    yield _named("blocks gathered to host memory", partial(_gather, setup))
    for label, draw in setup.sizes.draws:
        rows = max(setup.sizes.batches)
        name = f"sampling, {label}, {rows} rows of {setup.sizes.vocab_size}"
        yield _named(name, partial(_sampling, setup, draw, rows))


def _named(name: str, run: partial[Row]) -> Measure:
    return Measure(name, partial(run, name))


def _half(setup: Setup, *shape: int) -> Tensor:
    return torch.randn(shape, device=setup.device, dtype=setup.dtype)


def _float(setup: Setup, *shape: int) -> Tensor:
    return torch.randn(shape, device=setup.device)


def _norm(setup: Setup, width: int, name: str) -> Row:
    shape = setup.sizes.tokens, width
    weight, num_bytes = _float(setup, width), shape[0] * width * (4 + 2)
    calls = setup.calls(
        num_bytes, lambda: partial(rms_norm, _float(setup, *shape), weight, 1e-5, setup.dtype)
    )
    return setup.of_bandwidth(name, num_bytes, calls, GOAL)


def _add_norm(setup: Setup, width: int, name: str) -> Row:
    shape = setup.sizes.tokens, width
    weight, num_bytes = _float(setup, width), shape[0] * width * (2 + 4 + 4 + 2)

    def call() -> Call:
        x, residual = _half(setup, *shape), _float(setup, *shape)
        return partial(add_rms_norm, x, residual, weight, 1e-5, 1.0, setup.dtype)

    return setup.of_bandwidth(name, num_bytes, setup.calls(num_bytes, call), GOAL)


def _rounded_norm(setup: Setup, width: int, name: str) -> Row:
    shape = setup.sizes.tokens, width
    weight, num_bytes = _float(setup, width), shape[0] * width * (2 + 4 + 4 + 2 + 1)

    def call() -> Call:
        x, residual = _half(setup, *shape), _float(setup, *shape)
        return partial(add_rms_norm_rounded, x, residual, weight, 1e-5, 1.0, setup.dtype)

    return setup.of_bandwidth(name, num_bytes, setup.calls(num_bytes, call))


def _kv_write(setup: Setup, format: str, name: str) -> Row:
    """Requests with a token each, in blocks of their own: what decode writes, of many clients at once."""
    heads, tokens = setup.sizes.small.heads, setup.sizes.tokens
    kv_bytes = heads.num_kv_heads * (heads.head_dim + 4 if format == "int8" else 2 * heads.head_dim)
    num_q, num_kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    num_bytes = tokens * (2 * (num_q + 2 * num_kv) + 2 * num_q + 2 * kv_bytes)
    copies = setup.timer.copies(num_bytes)
    layers = new_pool(format, heads, copies, tokens * BLOCK_SIZE, setup.device).layers()
    inputs = step([(0, 1)] * tokens, setup.device)
    rope = RopeTable(_float(setup, 16, heads.head_dim // 2), _float(setup, 16, heads.head_dim // 2))
    calls: list[Call] = [
        partial(rope_kv_write, _half(setup, tokens, num_q + 2 * num_kv), heads, inputs, layer, rope)
        for layer in layers
    ]
    return setup.of_bandwidth(name, num_bytes, calls, GOAL)


def _glu(setup: Setup, name: str) -> Row:
    tokens, width = setup.sizes.tokens, setup.sizes.small.intermediate
    num_bytes = tokens * width * 2 * 3
    calls = setup.calls(num_bytes, lambda: partial(glu, _half(setup, tokens, 2 * width), "silu"))
    return setup.of_bandwidth(name, num_bytes, calls)


def _dequantize(setup: Setup, name: str) -> Row:
    size = setup.sizes.square
    weight = random_weight(setup, size, size, 4)
    call = partial(dequantize, weight, 0, size, setup.dtype)
    return setup.of_bandwidth(name, weight.nbytes + 2 * size * size, [call])


def _embedding(setup: Setup, name: str) -> Row:
    """A strip of sixteen rows is read for each token."""
    size, tokens = setup.sizes.square, setup.sizes.tokens
    weight = random_weight(setup, size, size, 4)
    ids = torch.randint(0, size, (tokens,), dtype=torch.int32, device=setup.device)
    return setup.of_bandwidth(name, tokens * size * (8 + 4), [partial(embedding, ids, weight)])


def _blocks(setup: Setup) -> Tensor:
    """A pool of whole blocks of the small model's, twice as many as are moved."""
    model = setup.sizes.small
    return new_pool("int8", model.heads, model.num_layers, 2 * setup.sizes.tokens, setup.device).data


def _copy(setup: Setup, name: str) -> Row:
    data = _blocks(setup)
    ids = torch.randperm(len(data), dtype=torch.int32).to(setup.device)
    half = len(data) // 2
    call = partial(copy_blocks, data, ids[:half], ids[half : 2 * half])
    return setup.of_bandwidth(name, 2 * half * data.shape[1], [call])


def _gather(setup: Setup, name: str) -> Row:
    """Half of the pool, one block here and one there; the bus is what it takes."""
    data = _blocks(setup)
    blocks = list(range(0, len(data), 2))
    on_gpu = setup.device.type == "cuda"
    host = torch.empty(len(blocks), data.shape[1], dtype=torch.uint8, pin_memory=on_gpu)
    seconds = setup.timer.seconds([partial(gather_blocks, data, blocks, host)], recorded=False)
    return Row(name, "GB/s", host.numel() / seconds / 1e9, None, note=f"{len(blocks)} blocks")


def _sampling(setup: Setup, draw: Draw, rows: int, name: str) -> Row:
    logits, num_bytes = _float(setup, rows, setup.sizes.vocab_size), 4 * rows * setup.sizes.vocab_size
    inputs = SamplingInputs.of([draw] * rows, setup.device)
    return setup.of_bandwidth(name, num_bytes, [partial(sample, logits, inputs)], note="of one pass")
