"""A Plan as the tensors of one forward. Runs before every step, so it is built in few numpy calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantd.engine.plan import Plan, PlanEntry
from quantd.kernels.ops import AttentionInputs

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """One step's inputs. token_ids: int32 [M]. attention: where the tokens stand.

    prompt_rows: int64 [P], the rows of the hidden state that log probabilities of prompt positions are
    read from, in order of entries and positions. sample_rows: int64 [S], the last row of each entry
    that samples.
    """

    token_ids: Tensor
    attention: AttentionInputs
    prompt_rows: Tensor
    sample_rows: Tensor


def build_batch(plan: Plan, block_size: int) -> Batch:
    """The tensors of `plan`, whose entries are not empty."""
    entries = plan.entries
    counts = [entry.num_tokens for entry in entries]
    starts = [entry.start for entry in entries]
    query_start = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    positions = np.arange(query_start[-1], dtype=np.int32)
    positions += np.repeat(np.array(starts, np.int32) - query_start[:-1], counts)
    tables = _block_tables(entries)
    owners = np.repeat(np.arange(len(entries)), counts)
    slots = tables[owners, positions // block_size] * block_size + positions % block_size
    return Batch(
        token_ids=torch.from_numpy(_token_ids(entries)),
        attention=AttentionInputs(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots.astype(np.int32, copy=False)),
            query_start=torch.from_numpy(query_start),
            context_len=torch.from_numpy(np.array(starts, np.int32) + np.array(counts, np.int32)),
            block_tables=torch.from_numpy(tables),
        ),
        prompt_rows=torch.tensor(_prompt_rows(entries, query_start), dtype=torch.int64),
        sample_rows=torch.from_numpy(query_start[1:][[entry.samples for entry in entries]] - 1).long(),
    )


def _token_ids(entries: tuple[PlanEntry, ...]) -> Ints:
    ids: list[int] = []
    for entry in entries:
        ids += entry.request.tokens(entry.start, entry.start + entry.num_tokens)
    return np.array(ids, np.int32)


def _block_tables(entries: tuple[PlanEntry, ...]) -> Ints:
    """[R, longest table], unused entries 0."""
    tables = np.zeros((len(entries), max(len(entry.blocks) for entry in entries)), np.int32)
    for row, entry in zip(tables, entries, strict=True):
        row[: len(entry.blocks)] = entry.blocks
    return tables


def prompt_logprob_positions(entry: PlanEntry) -> range:
    """Prompt positions whose log probabilities this entry must give: those after its tokens, once each."""
    state = entry.request
    if state.request.sampling.prompt_logprobs is None:
        return range(0)
    first = max(entry.start, state.num_prompt_logprobs) + 1
    return range(first, min(entry.start + entry.num_tokens + 1, len(state.request.prompt)))


def _prompt_rows(entries: tuple[PlanEntry, ...], query_start: Ints) -> list[int]:
    """The row of position p - 1 says how likely the token at p is."""
    return [
        begin + position - 1 - entry.start
        for entry, begin in zip(entries, query_start.tolist(), strict=False)
        for position in prompt_logprob_positions(entry)
    ]
