"""From a prompt's hidden states to its one vector: pooled, cut to the dimensions asked for, of length 1.

Sums are in float64 and go from one position to the next, so that no bit depends on where chunks end.
Source: sentence-transformers' modules Pooling (mean, lasttoken, cls) and Normalize, and its truncate_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quantd.engine.plan import EntryOutput, HiddenSum, Plan, PlanEntry
from quantd.engine.request import EmbeddingParams, Pooling

HiddenRow: TypeAlias = npt.NDArray[np.float32]
"""A token's hidden state behind the final norm, [H]."""

NOT_FINITE = "the model gave hidden states that are not finite (NaN or Inf)"

_POSITIONS: Mapping[Pooling, Callable[[int], range]] = {
    "mean": lambda prompt_len: range(prompt_len),
    "last": lambda prompt_len: range(prompt_len - 1, prompt_len),
    "first": lambda prompt_len: range(1),
}


def pooled_rows(plan: Plan) -> list[int]:
    """The rows of a step's hidden states that embeddings are made of, in the order of its entries."""
    rows, start = list[int](), 0
    for entry in plan.entries:
        rows += [start + position - entry.start for position in _positions(entry)]
        start += entry.num_tokens
    return rows


def pool(entry: PlanEntry, rows: Iterator[HiddenRow]) -> EntryOutput:
    """An entry's part of a step: its sum so far, or its vector. Takes its own rows, all of them."""
    request = entry.request.request
    assert request.embedding is not None
    before = entry.request.hidden_sum if entry.start else None
    total = _add(before, islice(rows, len(_positions(entry))))
    if entry.start + entry.num_tokens < len(request.prompt):
        return EntryOutput(hidden_sum=total)
    assert total is not None, f"request {request.id} has no hidden state"
    if not np.isfinite(total).all():
        return EntryOutput(error=NOT_FINITE)
    mean = total / len(_POSITIONS[request.embedding.pooling](len(request.prompt)))
    return EntryOutput(embedding=_vector(mean, request.embedding))


def _positions(entry: PlanEntry) -> range:
    """The positions of an entry that are pooled."""
    request = entry.request.request
    if request.embedding is None:
        return range(0)
    pooled = _POSITIONS[request.embedding.pooling](len(request.prompt))
    return range(max(entry.start, pooled.start), min(entry.start + entry.num_tokens, pooled.stop))


def _add(total: HiddenSum | None, rows: Iterator[HiddenRow]) -> HiddenSum | None:
    for row in rows:
        total = row.astype(np.float64) if total is None else total + row
    return total


def _vector(mean: HiddenSum, params: EmbeddingParams) -> bytes:
    kept = mean[: params.dimensions]
    length = float(np.sqrt((kept * kept).sum()))
    # A vector of zeros has no direction to keep.
    return (kept / length if params.normalize and length else kept).astype("<f4").tobytes()
