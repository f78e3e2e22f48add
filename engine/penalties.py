"""What changes a request's logits before a token is drawn: masks, biases and penalties.

Each adjustment is a row of a table: when it applies, and how it changes the row [V] in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantd.engine.plan import RequestState
from quantd.kernels.shortlist import Row


class Adjustment(NamedTuple):
    """`apply` changes a request's logits in place, where `wanted`."""

    wanted: Callable[[RequestState], bool]
    apply: Callable[[RequestState, Row], None]


def adjusted(row: Row, state: RequestState) -> Row:
    """The logits that `state`'s next token is drawn from; `row` itself where nothing applies."""
    steps = [adjustment.apply for adjustment in _ADJUSTMENTS if adjustment.wanted(state)]
    if steps:
        row = row.copy()
    for apply in steps:
        apply(state, row)
    return row


def masked_ends(state: RequestState, num_output: int) -> tuple[int, ...]:
    """Stop ids that must not come yet, after so many tokens, for want of min_tokens.

    Of a request with a grammar none: its own mask heeds min_tokens.
    """
    params = state.request.sampling
    return params.stop_token_ids if num_output < params.min_tokens and state.matcher is None else ()


def _masked_ends_now(state: RequestState) -> tuple[int, ...]:
    return masked_ends(state, len(state.output))


def _mask_ends(state: RequestState, row: Row) -> None:
    row[list(_masked_ends_now(state))] = -np.inf


def _add_bias(state: RequestState, row: Row) -> None:
    bias = state.request.sampling.logit_bias
    row[list(bias.keys())] += np.fromiter(bias.values(), np.float32, len(bias))


def _penalize_repetition(state: RequestState, row: Row) -> None:
    """Scores of tokens in prompt or output move towards minus infinity by a factor (CTRL, 2019)."""
    seen = state.token_counts.token_ids
    scores = row[seen]
    penalty = np.float32(state.request.sampling.repetition_penalty)
    row[seen] = np.where(scores < 0, scores * penalty, scores / penalty)


def _has_count_penalty(state: RequestState) -> bool:
    params = state.request.sampling
    return bool(state.output) and (params.frequency_penalty != 0 or params.presence_penalty != 0)


def _penalize_counts(state: RequestState, row: Row) -> None:
    """Minus frequency_penalty per occurrence in the output, minus presence_penalty once (OpenAI)."""
    params, known = state.request.sampling, state.token_counts
    drawn = known.counts > 0
    taken = params.frequency_penalty * known.counts[drawn] + params.presence_penalty
    row[known.token_ids[drawn]] -= taken.astype(np.float32)


_ADJUSTMENTS = (
    Adjustment(lambda state: bool(_masked_ends_now(state)), _mask_ends),
    Adjustment(lambda state: bool(state.request.sampling.logit_bias), _add_bias),
    Adjustment(lambda state: state.request.sampling.repetition_penalty != 1, _penalize_repetition),
    Adjustment(_has_count_penalty, _penalize_counts),
)
