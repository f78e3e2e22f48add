"""Log probabilities of one position, from its raw logits [V] (float32)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantd.engine.request import TokenLogprob
from quantd.kernels.shortlist import Row

TokenIds = npt.NDArray[np.intp]


def token_logprob(row: Row, token_id: int, num_top: int) -> TokenLogprob:
    """The log probability of `token_id` and of the `num_top` likeliest tokens."""
    peak = row.max()
    log_total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    ids = largest(row, num_top)
    best_first = ids[np.argsort(-row[ids], kind="stable")]
    top = [(int(i), float(row[i]) - log_total) for i in best_first]
    return TokenLogprob(token_id, float(row[token_id]) - log_total, top)


def largest(values: Row, count: int) -> TokenIds:
    """Indices, ascending, of the `count` largest values; among equals the lower ones stay."""
    if count <= 0 or count >= len(values):
        return np.arange(len(values) if count > 0 else 0)
    rank = len(values) - count
    threshold = np.partition(values, rank)[rank]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))
