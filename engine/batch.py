"""A Plan as the tensors of one forward.

Runs before every step, so it costs microseconds: over so few numbers, lists are faster than arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantd.engine.plan import Plan, PlanEntry
from quantd.kernels.ops import AttentionInputs

AHEAD = -1
"""Stands for the token that the step before draws."""


@dataclass(frozen=True)
class Batch:
    """One step's inputs. attention: where the tokens stand.

    token_ids: int32 [M], AHEAD for those that nobody knows yet. prompt_rows: int32 [P], the rows of the
    hidden state that log probabilities of prompt positions are read from, in order of entries and
    positions. sample_rows: int32 [S], the last row of each entry that samples.
    """

    token_ids: Tensor
    attention: AttentionInputs
    prompt_rows: Tensor
    sample_rows: Tensor


def build_batch(plan: Plan, block_size: int) -> Batch:
    """The tensors of `plan`, whose entries are not empty."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    prompt_rows: list[int] = []
    for entry in plan.entries:
        stop, blocks = entry.start + entry.num_tokens, entry.blocks
        token_ids += [AHEAD] if entry.ahead else entry.request.tokens(entry.start, stop)
        positions += range(entry.start, stop)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(entry.start, stop)]
        # The row of position p - 1 says how likely the token at p is.
        first_row = query_start[-1] - entry.start
        prompt_rows += [first_row + p - 1 for p in prompt_logprob_positions(entry)]
        query_start.append(query_start[-1] + entry.num_tokens)
    ends = zip(plan.entries, query_start[1:], strict=True)
    return Batch(
        token_ids=_int32(token_ids),
        attention=AttentionInputs(
            positions=_int32(positions),
            slots=_int32(slots),
            query_start=_int32(query_start),
            context_len=_int32([entry.start + entry.num_tokens for entry in plan.entries]),
            block_tables=_block_tables(plan.entries),
        ),
        prompt_rows=_int32(prompt_rows),
        sample_rows=_int32([end - 1 for entry, end in ends if entry.samples]),
    )


def _int32(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32))


def _block_tables(entries: tuple[PlanEntry, ...]) -> Tensor:
    """[R, longest table], unused entries 0."""
    tables = np.zeros((len(entries), max(len(entry.blocks) for entry in entries)), np.int32)
    for row, entry in zip(tables, entries, strict=True):
        row[: len(entry.blocks)] = entry.blocks
    return torch.from_numpy(tables)


def prompt_logprob_positions(entry: PlanEntry) -> range:
    """Prompt positions whose log probabilities this entry must give: those after its tokens, once each."""
    state = entry.request
    if state.request.sampling.prompt_logprobs is None:
        return range(0)
    first = max(entry.start, state.num_prompt_logprobs) + 1
    return range(first, min(entry.start + entry.num_tokens + 1, len(state.request.prompt)))
