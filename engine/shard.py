"""Cutting weights for ranks that share a matrix: by outputs, or by runs of whole input groups.

A weight in the runtime layout is cut before any backend packs it, and each of several matrices before
they are joined. What comes out is exact: codes, scales and offsets are never computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantd.engine.errors import RequestError
from quantd.engine.layers.join import Piece
from quantd.engine.split import World, even
from quantd.kernels.ops import HeadShape
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight

_UNIT = 64  # Outputs, and inputs without groups, are dealt out in so many where there are enough of them.


@dataclass(frozen=True)
class Part:
    """What one rank holds of a decoder: its stage's layers, and share `rank` of `size` of their matrices.

    The first stage holds embedding, final norm and output matrix too.
    """

    layers: range
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, world: World, rank: int) -> Part:
        """The part of a rank."""
        return cls(world.layers(rank), world.place(rank), world.tp)

    @property
    def has_ends(self) -> bool:
        """Whether tokens enter and logits leave here."""
        return self.layers.start == 0


@dataclass(frozen=True)
class Gather:
    """A matrix whose inputs cannot be dealt out: every rank takes all of them and gives some outputs.

    inputs, outputs: how many each rank brings and gives.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class HeadShare:
    """A rank's query heads, and the key/value heads that they read."""

    queries: range
    keys: range

    def shape(self, head_dim: int) -> HeadShape:
        """These heads alone."""
        return HeadShape(len(self.queries), len(self.keys), head_dim)

    def columns(self, head_dim: int) -> range:
        """The elements of the query heads, which are the outputs of attention."""
        return range(self.queries.start * head_dim, self.queries.stop * head_dim)

    def qkv_rows(self, heads: HeadShape) -> Tensor:
        """Outputs of the joined queries, keys and values of all `heads` that make up this share, int64."""
        keys_start = heads.num_heads
        values_start = keys_start + heads.num_kv_heads
        chosen = [*self.queries, *(keys_start + k for k in self.keys), *(values_start + k for k in self.keys)]
        first = torch.tensor(chosen)[:, None] * heads.head_dim
        return (first + torch.arange(heads.head_dim)).flatten()


class Shares:
    """How the matrices of one decoder are dealt out, as one rank takes them; whole where it is the only one.

    Rows are int64, None for all.
    """

    def __init__(self, heads: HeadShape, part: Part) -> None:
        self._heads = heads
        self._head_shares = head_shares(heads, part.size)
        self._rank = part.rank
        self._size = part.size

    def vocabulary(self, num_words: int) -> Tensor | None:
        """Rows of the embedding and of the output matrix."""
        return None if self._size == 1 else _indices(output_shares(num_words, self._size)[self._rank])

    def qkv(self) -> Tensor | None:
        """Rows of the joined queries, keys and values."""
        return None if self._size == 1 else self._head_shares[self._rank].qkv_rows(self._heads)

    def o(self, piece: Piece) -> tuple[Piece, Gather | None]:
        """The projection behind attention. Its inputs are those of the heads, or gathered."""
        if self._size == 1:
            return piece, None
        columns = [share.columns(self._heads.head_dim) for share in self._head_shares]
        if can_cut_inputs(piece.weight, columns):
            return cut_inputs(piece, columns[self._rank], keep_bias=self._rank == 0), None
        return self._gathering(piece, columns)

    def down(self, piece: Piece) -> tuple[Piece, Gather | None, Tensor | None]:
        """The projection behind the activation, and the rows of the joined gate and up that feed it."""
        if self._size == 1:
            return piece, None, None
        num_inputs = piece.weight.shape[1]
        columns, gather = input_shares(piece.weight, self._size), None
        if columns is not None:
            inner = columns_of(piece.weight, columns[self._rank])
            piece = cut_inputs(piece, columns[self._rank], keep_bias=self._rank == 0)
        else:
            columns = output_shares(num_inputs, self._size)
            inner = _indices(columns[self._rank])
            piece, gather = self._gathering(piece, columns)
        return piece, gather, torch.cat([inner, num_inputs + inner])

    def _gathering(self, piece: Piece, inputs: Sequence[range]) -> tuple[Piece, Gather]:
        outputs = output_shares(piece.weight.shape[0], self._size)
        gather = Gather(tuple(map(len, inputs)), tuple(map(len, outputs)))
        return cut_outputs(piece, _indices(outputs[self._rank])), gather


def head_shares(heads: HeadShape, size: int) -> list[HeadShare]:
    """Each rank's heads, in order. Key/value heads are dealt out whole, or repeated where ranks are more.

    Raises RequestError where there are too few query heads.
    """
    queries = heads.num_heads // heads.num_kv_heads  # that read one key/value head
    if size <= heads.num_kv_heads:
        runs = even(heads.num_kv_heads, size)
        return [HeadShare(range(run.start * queries, run.stop * queries), run) for run in runs]
    shares = []
    for key, ranks in enumerate(even(size, heads.num_kv_heads)):
        if len(ranks) > queries:
            raise RequestError(
                f"tp {size} is more than the {heads.num_heads} query heads of this model can be dealt out to",
                "tp",
            )
        first = key * queries
        shares += [
            HeadShare(range(first + run.start, first + run.stop), range(key, key + 1))
            for run in even(queries, len(ranks))
        ]
    return shares


def output_shares(num_outputs: int, size: int) -> list[range]:
    """Each rank's outputs of a matrix (or words of a vocabulary) of which any may be taken."""
    return even(num_outputs, size, _unit(num_outputs, size))


def input_shares(weight: Weight, size: int) -> list[range] | None:
    """Each rank's columns (see columns_of), in whole groups; None where ranks are more than groups."""
    num_inputs = weight.shape[1]
    group = _group_size(weight)
    if group is None:
        return output_shares(num_inputs, size)
    return even(num_inputs, size, group) if -(-num_inputs // group) >= size else None


def can_cut_inputs(weight: Weight, shares: Sequence[range]) -> bool:
    """Whether these runs of inputs are runs of columns, and of whole groups."""
    if isinstance(weight, QuantizedWeight) and weight.perm is not None:
        return False
    group = _group_size(weight)
    return group is None or all(share.start % group == 0 for share in shares)


def columns_of(weight: Weight, columns: range) -> Tensor:
    """Which inputs some columns multiply, int64: with act-order, columns are sorted by group."""
    perm = weight.perm if isinstance(weight, QuantizedWeight) else None
    return _indices(columns) if perm is None else perm[columns.start : columns.stop]


def cut_outputs(piece: Piece, rows: Tensor | None) -> Piece:
    """The outputs `rows`, int64, in that order; None for all of them."""
    weight, bias = piece.weight, piece.bias
    if rows is None:
        return piece
    cut: Weight
    if isinstance(weight, DenseWeight):
        cut = DenseWeight(weight.values[rows])
    else:
        cut = replace(weight, codes=weight.codes[rows], scale=weight.scale[rows], offset=weight.offset[rows])
    return Piece(cut, None if bias is None else bias[rows])


def cut_inputs(piece: Piece, columns: range, keep_bias: bool) -> Piece:
    """Those columns, whose inputs must come in the columns' order: any permutation is gone.

    Ranks' results are summed, so one of them keeps the bias (case c39). Inputs that are rounded per token
    (W8A8) are rounded by the largest of a rank's own, never more coarsely than by the largest of all. To find
    that first would take a second exchange for each matrix, which in decode takes as long as the sum does,
    and would give the numbers of one rank, but no better ones.
    """
    weight = piece.weight
    chosen = slice(columns.start, columns.stop)
    cut: Weight
    if isinstance(weight, DenseWeight):
        cut = DenseWeight(weight.values[:, chosen].contiguous())
    else:
        group = _group_size(weight)
        groups = slice(0, 1) if group is None else slice(columns.start // group, -(-columns.stop // group))
        cut = replace(
            weight,
            codes=weight.codes[:, chosen].contiguous(),
            scale=weight.scale[:, groups].contiguous(),
            offset=weight.offset[:, groups].contiguous(),
            group_size=len(columns) if group is None else group,
            perm=None,
        )
    return Piece(cut, piece.bias if keep_bias else None)


def _indices(run: range) -> Tensor:
    return torch.arange(run.start, run.stop)


def _group_size(weight: Weight) -> int | None:
    """Inputs under one scale; None where that is all of them, or there are no scales."""
    if isinstance(weight, DenseWeight) or weight.scale.shape[1] == 1:
        return None
    return weight.group_size


def _unit(total: int, parts: int) -> int:
    unit = _UNIT
    while unit > 1 and -(-total // unit) < parts:
        unit //= 2
    return unit
