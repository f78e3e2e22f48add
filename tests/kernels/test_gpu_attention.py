"""Attention of the Triton kernels against the reference, and bit for bit in any company."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from cpu_cases import Pool
from gpu_pool import Span, filled_layer, step_inputs, take
from torch import Tensor

from quantd.kernels.gpu.attention import attention
from quantd.kernels.gpu.attention_plan import SCRATCH_BYTES, Launch, Share, Tiling, plan, tiling_for
from quantd.kernels.gpu.tuning import Gpu
from quantd.kernels.ops import HeadShape
from quantd.kernels.reference import ReferenceOps

TILING = Tiling(tile_len=16, split_len=32)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 6e-3}
SCALE = 0.2

Case = tuple[HeadShape, int, list[int], list[Span], int, float]

# heads, block size, lengths, spans, window, soft cap. Prefill, decode and a few tokens at once; contexts
# that end before, on and behind a split's edge; heads of all sizes, and groups that fill no tile evenly.
CASES: list[Case] = [
    (HeadShape(2, 1, 64), 16, [70, 12, 1], [(0, 66, 70), (1, 0, 12), (2, 0, 1)], 0, 0.0),
    (HeadShape(3, 1, 80), 4, [64, 9], [(0, 63, 64), (1, 7, 9)], 20, 5.0),
    (HeadShape(5, 1, 96), 8, [97], [(0, 93, 97)], 0, 30.0),
    (HeadShape(2, 2, 128), 16, [65, 32, 33], [(0, 64, 65), (1, 31, 32), (2, 32, 33)], 1, 0.0),
    (HeadShape(2, 1, 256), 16, [96], [(0, 92, 96)], 33, 0.0),
    (HeadShape(40, 1, 20), 5, [33], [(0, 32, 33)], 0, 0.0),
]
TYPES = [
    ("int8", torch.float16),
    ("fp32", torch.float32),
    ("int8", torch.bfloat16),
    ("fp16", torch.float16),
    ("bf16", torch.bfloat16),
    ("fp16", torch.bfloat16),
    ("int8", torch.float32),
]


@pytest.fixture(autouse=True)
def seed(poisoned_outputs: None) -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("format", "dtype", "case"),
    [(*types, case) for types in TYPES[:2] for case in CASES]
    + [(*types, case) for types in TYPES[2:] for case in (CASES[0], CASES[3])],
)
def test_attention(format: str, dtype: torch.dtype, case: Case, gpu_device: str) -> None:
    heads, block_size, lengths, spans, window, softcap = case
    pool = Pool.scattered(lengths, block_size)
    layer, queries = filled_layer(pool, format, heads, gpu_device)
    q, inputs = take(queries, spans).to(dtype), step_inputs(pool, spans, gpu_device)
    expected = ReferenceOps().attention(q.float(), heads, inputs, layer, SCALE, window, softcap)
    actual = attention(q, heads, inputs, layer, SCALE, window, softcap, TILING)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("format", ["int8", "fp16"])
def test_attention_as_it_is_launched(format: str, gpu_device: str) -> None:
    """The tiling that this device gets, and a context of two of its splits."""
    heads, spans = HeadShape(2, 1, 64), [(0, 299, 300), (1, 0, 20)]
    pool = Pool.scattered([300, 20], 16)
    layer, queries = filled_layer(pool, format, heads, gpu_device)
    q, inputs = take(queries, spans).half(), step_inputs(pool, spans, gpu_device)
    expected = ReferenceOps().attention(q.float(), heads, inputs, layer, SCALE)
    actual = attention(q, heads, inputs, layer, SCALE)
    torch.testing.assert_close(actual.float(), expected, atol=3e-3, rtol=3e-3)


# rows of a tile, direct, splits at a time, programs along the context
FORMS = [(16, True, 4, 1), (32, True, 4, 1), (16, False, 4, 3), (32, False, 3, 1), (16, False, 1, 1)]


@pytest.mark.parametrize(
    ("format", "heads", "window", "softcap"),
    [("int8", HeadShape(3, 1, 20), 0, 0.0), ("fp16", HeadShape(2, 2, 16), 40, 5.0)],
)
def test_launches_change_no_bit(
    format: str,
    heads: HeadShape,
    window: int,
    softcap: float,
    gpu_device: str,
) -> None:
    pool, spans = Pool.scattered([100, 70], 4), [(0, 98, 100), (1, 64, 67)]
    layer, queries = filled_layer(pool, format, heads, gpu_device)
    # In float32, where no rounding of the result hides in which order sums were taken.
    q, inputs = take(queries, spans), step_inputs(pool, spans, gpu_device)
    share = Share(1, 5, 1, 5, 2)
    expected = ReferenceOps().attention(q, heads, inputs, layer, SCALE, window, softcap)
    first: Tensor | None = None
    for tile_rows, direct, num_splits, num_programs in FORMS:
        launch = Launch(share, tile_rows, 5 * 3 // tile_rows + 2, direct, num_splits, num_programs)
        actual = attention(q, heads, inputs, layer, SCALE, window, softcap, TILING, [launch])
        torch.testing.assert_close(actual, expected, atol=3e-6, rtol=3e-6)
        first = actual if first is None else first
        assert torch.equal(actual, first), launch


@pytest.mark.parametrize(
    ("format", "heads", "window", "softcap"),
    [
        ("int8", HeadShape(1, 1, 16), 0, 0.0),
        ("fp16", HeadShape(2, 1, 20), 21, 0.0),
        ("fp32", HeadShape(1, 1, 16), 0, 5.0),
    ],
)
def test_chunks_and_company_change_no_bit(
    format: str, heads: HeadShape, window: int, softcap: float, gpu_device: str
) -> None:
    pool = Pool.scattered([41, 3, 20], 4)
    layer, queries = filled_layer(pool, format, heads, gpu_device)

    def run(*spans: Span) -> list[Tensor]:
        inputs, q = step_inputs(pool, spans, gpu_device), take(queries, spans)
        rows = attention(q, heads, inputs, layer, SCALE, window, softcap, TILING)
        return list(rows.split([last - first for _, first, last in spans]))

    (whole,) = run((0, 0, 41))
    for length in (1, 3, 8, 9):  # alone, as decode, the check of a draft and prefill have them
        assert torch.equal(run((0, 41 - length, 41))[0], whole[-length:]), length
    for spans in (
        [(0, 30, 34), (1, 2, 3), (2, 9, 20)],
        [(2, 19, 20), (0, 31, 41), (1, 0, 3)],
        [(0, 32, 33), (0, 40, 41)],
    ):
        for span, rows in zip(spans, run(*spans), strict=True):
            if span[0] == 0:
                assert torch.equal(rows, whole[span[1] : span[2]]), (spans, span)


def test_requests_without_tokens_and_rows_without_request(gpu_device: str) -> None:
    heads, pool = HeadShape(1, 1, 16), Pool.scattered([40, 20], 4)
    layer, queries = filled_layer(pool, "int8", heads, gpu_device)
    spans = [(1, 20, 20), (0, 39, 40), (0, 40, 40), (1, 8, 20), (0, 0, 0)]
    q, inputs = take(queries, spans).half(), step_inputs(pool, spans, gpu_device)
    expected = torch.cat([queries[0][39:40], queries[1][8:20]]).half()
    spans = [(0, 39, 40), (1, 8, 20)]
    expected = attention(expected, heads, step_inputs(pool, spans, gpu_device), layer, SCALE, tiling=TILING)
    padded = torch.cat([q, q[:3]])
    actual = attention(padded, heads, inputs, layer, SCALE, tiling=TILING)
    assert torch.equal(actual[:-3], expected)
    assert actual[-3:].isnan().all()


def test_more_requests_than_are_looked_at_at_a_time(gpu_device: str) -> None:
    heads, lengths = HeadShape(1, 1, 16), [1 + i % 3 for i in range(70)]
    pool = Pool.scattered(lengths, 4)
    layer, queries = filled_layer(pool, "int8", heads, gpu_device)
    spans = [(i, length - 1, length) for i, length in enumerate(lengths)]
    q, inputs = take(queries, spans).half(), step_inputs(pool, spans, gpu_device)
    expected = ReferenceOps().attention(q.float(), heads, inputs, layer, SCALE)
    torch.testing.assert_close(
        attention(q, heads, inputs, layer, SCALE).float(), expected, atol=3e-3, rtol=3e-3
    )


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, in the interpreter
def test_a_broken_token_is_not_seen_by_those_before(gpu_device: str) -> None:
    heads, pool = HeadShape(1, 1, 16), Pool.scattered([12], 4)
    layer, queries = filled_layer(pool, "int8", heads, gpu_device)
    q, inputs = queries[0].half(), step_inputs(pool, [(0, 0, 12)], gpu_device)
    whole = attention(q, heads, inputs, layer, SCALE)
    block, offset = int(inputs.slots[9]) // 4, int(inputs.slots[9]) % 4
    assert layer.k_scale is not None and layer.v_scale is not None
    layer.k_scale[block, 0, offset] = layer.v_scale[block, 0, offset] = torch.nan
    broken = attention(q, heads, inputs, layer, SCALE)
    assert torch.equal(broken[:9], whole[:9])
    assert broken[9:].isnan().all()


def test_largest_values_of_fp16_are_averaged(gpu_device: str) -> None:
    heads, pool = HeadShape(1, 1, 16), Pool.scattered([3], 4)
    layer, queries = filled_layer(pool, "int8", heads, gpu_device)
    layer.v.fill_(127)
    assert layer.v_scale is not None
    layer.v_scale.fill_(65504 / 127)
    actual = attention(queries[0].half(), heads, step_inputs(pool, [(0, 0, 3)], gpu_device), layer, SCALE)
    torch.testing.assert_close(actual.float(), torch.full_like(actual, 65504.0).float(), atol=64, rtol=0)


GPUS = [Gpu("laptop", 89, 24), Gpu("server", 90, 132), Gpu("turing", 75, 40)]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("heads", [HeadShape(32, 8, 128), HeadShape(9, 3, 64), HeadShape(40, 1, 256)])
def test_plans_hold_every_step_of_their_size(gpu: Gpu, heads: HeadShape) -> None:
    generator, group = random.Random(0), heads.num_heads // heads.num_kv_heads
    for num_requests in (1, 2, 7, 64):
        for longest in (1, 3, 20, 700):
            lengths = [generator.randint(1, longest) for _ in range(num_requests)]
            for num_splits in (1, 9, 500):
                left = lengths
                for launch in plan(sum(lengths), num_requests, num_splits, heads, gpu):
                    share, step = launch.share, launch.num_splits
                    mine = [n for n in left if share.min_len <= n <= share.max_len]
                    left = [n for n in left if not share.min_len <= n <= share.max_len]
                    assert sum(mine) <= share.max_tokens
                    assert sum(-(-n * group // launch.tile_rows) for n in mine) <= launch.num_tiles
                    assert launch.splits_per_program * launch.num_programs >= step
                    assert not launch.direct or step == num_splits
                    partial = share.max_tokens * heads.num_heads * (heads.head_dim + 2) * 4 * step
                    assert launch.direct or partial <= SCRATCH_BYTES or step == 1
                assert not left


def test_decode_is_split_and_long_prefill_is_not() -> None:
    heads, gpu = HeadShape(32, 8, 128), GPUS[1]
    for num_requests in (1, 16, 64):
        (decode,) = plan(num_requests, num_requests, 64, heads, gpu)
        assert not decode.direct and decode.tile_rows == 16
        assert decode.num_tiles * heads.num_kv_heads * decode.num_programs >= 3 * gpu.num_sms
    (prefill,) = plan(2048, 1, 64, heads, gpu)
    assert prefill.direct and prefill.tile_rows == 32
    short, long = plan(2048 + 15, 16, 64, heads, gpu)
    assert not short.direct and short.share.max_tokens == 128
    assert long.direct and (short.share.max_len, long.share.min_len) == (8, 9)
    assert [launch.tile_rows for launch in plan(500, 10, 64, HeadShape(32, 32, 96), gpu)] == [16, 32]


def test_tilings_cut_splits_evenly() -> None:
    for gpu in GPUS:
        for dim, value_bytes in product((64, 128, 256), (1, 2, 4)):
            tiling = tiling_for(dim, gpu, value_bytes)
            assert tiling.split_len % tiling.tile_len == 0
