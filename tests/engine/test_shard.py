"""Cut weights put together again are the whole: sums over inputs, outputs side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantd.engine.errors import RequestError
from quantd.engine.layers.join import Piece, join_alike
from quantd.engine.shard import (
    Part,
    can_cut_inputs,
    columns_of,
    cut_inputs,
    cut_outputs,
    head_shares,
    input_shares,
    output_shares,
)
from quantd.engine.split import World
from quantd.kernels.ops import HeadShape
from quantd.kernels.reference import ReferenceOps
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight

OPS = ReferenceOps("fp32")
SIZES = (1, 2, 3, 4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(
    n: int, k: int, group_size: int, ordered: bool = False, bits: int = 4, input_bits: int | None = None
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(n * k)
    groups = -(-k // group_size)
    return QuantizedWeight(
        torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator),
        torch.rand(n, groups, generator=generator),
        torch.randn(n, groups, generator=generator),
        bits,
        group_size,
        torch.randperm(k, generator=generator) if ordered else None,
        input_bits,
    )


WEIGHTS: dict[str, Weight] = {
    "plain": DenseWeight(random(24, 93)),
    "bf16": DenseWeight(random(24, 256).bfloat16()),
    "groups": quantized(24, 128, 32),
    "groups that do not come out even": quantized(24, 231 * 4 - 3, 4),
    "act-order": quantized(24, 7 * 16, 16, ordered=True),
    "one group": quantized(24, 90, 90, bits=8),
    "one group larger than the inputs": quantized(24, 90, 128, bits=3),
    "W8A8": quantized(24, 96, 96, bits=8, input_bits=8),
}


def linear(x: Tensor, piece: Piece) -> Tensor:
    return OPS.linear(x, OPS.pack(piece.weight, piece.bias))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_sums_over_cut_inputs_are_those_of_the_whole(name: str, size: int) -> None:
    piece = Piece(WEIGHTS[name], random(24, seed=1))
    x = random(5, piece.weight.shape[1], seed=2)
    shares = input_shares(piece.weight, size)
    assert shares is not None
    inputs = [columns_of(piece.weight, share) for share in shares]
    assert torch.equal(torch.cat(inputs).sort().values, torch.arange(x.shape[1]))
    parts = [cut_inputs(piece, share, keep_bias=rank == 0) for rank, share in enumerate(shares)]
    total = sum(linear(x[:, own], part) for own, part in zip(inputs, parts, strict=True))
    torch.testing.assert_close(total, linear(x, piece), rtol=1e-5, atol=1e-4)
    # Exact, not only close: every code, scale and offset is where it was.
    whole = torch.empty(24, x.shape[1])
    for own, part in zip(inputs, parts, strict=True):
        assert not isinstance(part.weight, QuantizedWeight) or part.weight.perm is None
        whole[:, own] = part.weight.dequantize()
    assert torch.equal(whole, piece.weight.dequantize())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_cut_outputs_side_by_side_are_the_whole(name: str, size: int) -> None:
    piece = Piece(WEIGHTS[name], random(24, seed=1))
    x = random(5, piece.weight.shape[1], seed=2)
    rows = [torch.arange(run.start, run.stop) for run in output_shares(24, size)]
    parts = [linear(x, cut_outputs(piece, own)) for own in rows]
    assert torch.equal(torch.cat(parts, 1), linear(x, piece))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_bias_counts_once(size: int) -> None:
    """Case c39."""
    weight = DenseWeight(torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]]))
    piece = Piece(weight, torch.tensor([100.0, 200]))
    x = torch.tensor([[1.0, 2, 3, 4]])
    shares = input_shares(weight, size)
    assert shares is not None and len(shares) == size
    parts = [
        linear(x[:, share.start : share.stop], cut_inputs(piece, share, keep_bias=rank == 0))
        for rank, share in enumerate(shares)
    ]
    assert sum(parts).tolist() == [[104, 206]]


def test_231_groups_over_two_ranks() -> None:
    weight = quantized(1, 29568, 128)
    shares = input_shares(weight, 2)
    assert shares is not None
    parts = [cut_inputs(Piece(weight, None), share, keep_bias=False).weight for share in shares]
    assert [part.scale.shape[1] for part in parts if isinstance(part, QuantizedWeight)] == [116, 115]


def test_what_cannot_be_cut_by_inputs() -> None:
    assert input_shares(quantized(8, 96, 32), 4) is None
    assert not can_cut_inputs(quantized(8, 96, 32, ordered=True), [range(32), range(32, 96)])
    assert not can_cut_inputs(quantized(8, 96, 32), [range(48), range(48, 96)])
    assert can_cut_inputs(quantized(8, 96, 32), [range(64), range(64, 96)])
    assert can_cut_inputs(quantized(8, 96, 96), [range(48), range(48, 96)])
    assert can_cut_inputs(DenseWeight(random(8, 96)), [range(48), range(48, 96)])


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        ((32, 8), 2, [(0, 16, 0, 4), (16, 32, 4, 8)]),
        ((9, 3), 2, [(0, 6, 0, 2), (6, 9, 2, 3)]),
        ((4, 4), 3, [(0, 2, 0, 2), (2, 3, 2, 3), (3, 4, 3, 4)]),
        ((8, 2), 4, [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]),
        ((9, 3), 4, [(0, 2, 0, 1), (2, 3, 0, 1), (3, 6, 1, 2), (6, 9, 2, 3)]),
        ((6, 1), 4, [(0, 2, 0, 1), (2, 4, 0, 1), (4, 5, 0, 1), (5, 6, 0, 1)]),
    ],
)
def test_heads_are_dealt_out_in_order(
    heads: tuple[int, int], size: int, expected: list[tuple[int, ...]]
) -> None:
    shares = head_shares(HeadShape(*heads, head_dim=4), size)
    found = [(s.queries.start, s.queries.stop, s.keys.start, s.keys.stop) for s in shares]
    assert found == expected
    for share in shares:
        own = share.shape(4)
        assert own.num_heads % own.num_kv_heads == 0
        # Query h of a rank reads its key h // g, which must be the one that it read before.
        for i, query in enumerate(share.queries):
            key = share.keys[i // (own.num_heads // own.num_kv_heads)]
            assert key == query // (heads[0] // heads[1])


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(RequestError, match="tp 5 is more than the 4 query heads"):
        head_shares(HeadShape(4, 2, 8), 5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_queries_keys_and_values_are_each_cut_before_they_are_joined(size: int) -> None:
    heads = HeadShape(8, 2, 3)
    q, k, v = (
        Piece(quantized(n * 3, 32, 16), random(n * 3, seed=i)) for i, n in enumerate((8, 2, 2), start=5)
    )
    (joined,) = join_alike([q, k, v])
    x = random(2, 32)
    outputs = linear(x, joined).view(2, -1, 3)
    for share in head_shares(heads, size):
        own = linear(x, cut_outputs(joined, share.qkv_rows(heads))).view(2, -1, 3)
        picked = [*share.queries, *(8 + key for key in share.keys), *(10 + key for key in share.keys)]
        assert torch.equal(own, outputs[:, picked])


def test_the_part_of_a_rank() -> None:
    world = World(2, ((0, 3), (3, 5)))
    assert Part.of(world, 1) == Part(range(3), rank=1, size=2)
    assert Part.of(world, 2) == Part(range(3, 5), rank=0, size=2)
    assert Part.of(world, 1).has_ends and not Part.of(world, 2).has_ends
