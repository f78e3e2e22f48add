"""Log probabilities of one position, from its raw logits [V] (float32)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantd.engine.request import TokenLogprob

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.intp]


def token_logprob(row: Row, token_id: int, num_top: int) -> TokenLogprob:
    """The log probability of `token_id` and of the `num_top` likeliest tokens."""
    peak = row.max()
    log_total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    top = [(int(i), float(row[i]) - log_total) for i in largest(row, num_top)]
    return TokenLogprob(token_id, float(row[token_id]) - log_total, top)


def largest(values: Row, count: int) -> TokenIds:
    """Indices of the `count` largest values, largest first, the lower index first among equals."""
    if count <= 0:
        return np.empty(0, dtype=np.intp)
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    rank = len(values) - count
    return descending(values, np.flatnonzero(values >= np.partition(values, rank)[rank]))[:count]


def descending(values: Row, ids: TokenIds) -> TokenIds:
    """`ids` (ascending) ordered by their values, largest first, the lower id first among equals."""
    return ids[np.argsort(-values[ids], kind="stable")]
