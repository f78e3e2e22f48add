"""Plan -> tensors, against a token-by-token account."""

from __future__ import annotations

from itertools import pairwise

import torch

from quantd.engine.batch import Batch, build_batch, prompt_logprob_positions
from quantd.engine.plan import Plan, PlanEntry, RequestState
from quantd.engine.request import Request, SamplingParams

BLOCK_SIZE = 4


def state(prompt_len: int, output_len: int = 0, **sampling: int) -> RequestState:
    request = Request(id="r", prompt=list(range(100, 100 + prompt_len)), sampling=SamplingParams(**sampling))
    return RequestState(request, output=list(range(500, 500 + output_len)))


def entry(
    request: RequestState, start: int, num_tokens: int, blocks: list[int], samples: bool = False
) -> PlanEntry:
    return PlanEntry(request, start, num_tokens, samples, blocks)


def mixed_plan() -> Plan:
    return Plan(
        (
            entry(state(9, 3), 11, 1, [7, 2, 9], samples=True),  # a decode
            entry(state(20), 6, 5, [3, 1, 4]),  # a chunk amid a prompt, inside a block
            entry(state(3), 0, 3, [8], samples=True),  # a whole prompt
            entry(state(5, 4), 3, 6, [5, 6, 0], samples=True),  # recomputed across prompt and output
        )
    )


def test_every_token_has_its_id_position_and_slot() -> None:
    plan = mixed_plan()
    batch = build_batch(plan, BLOCK_SIZE)
    expected = [
        (
            e.request.tokens(0, 99)[position],
            position,
            e.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        )
        for e in plan.entries
        for position in range(e.start, e.start + e.num_tokens)
    ]
    columns = (batch.token_ids, batch.attention.positions, batch.attention.slots)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_requests_are_described_in_order() -> None:
    plan = mixed_plan()
    attention = build_batch(plan, BLOCK_SIZE).attention
    assert [b - a for a, b in pairwise(attention.query_start.tolist())] == [1, 5, 3, 6]
    assert attention.context_len.tolist() == [12, 11, 3, 9]
    assert attention.block_tables.tolist() == [[7, 2, 9], [3, 1, 4], [8, 0, 0], [5, 6, 0]]


def test_index_tensors_are_int32() -> None:
    batch = build_batch(mixed_plan(), BLOCK_SIZE)
    tensors = (batch.token_ids, *vars(batch.attention).values())
    assert {tensor.dtype for tensor in tensors} == {torch.int32}
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_only_sampling_entries_need_logits() -> None:
    batch = build_batch(mixed_plan(), BLOCK_SIZE)
    assert batch.sample_rows.tolist() == [0, 8, 14]
    assert batch.prompt_rows.tolist() == []
    nothing_sampled = Plan((entry(state(20), 0, 4, [0]),))
    assert build_batch(nothing_sampled, BLOCK_SIZE).sample_rows.tolist() == []


def chunks(request: RequestState, sizes: list[int]) -> list[tuple[range, Batch]]:
    result, start, total = [], 0, request.num_tokens
    for size in sizes:
        plan = Plan((entry(request, start, size, [0, 1, 2], samples=start + size == total),))
        positions = prompt_logprob_positions(plan.entries[0])
        result.append((positions, build_batch(plan, BLOCK_SIZE)))
        start += size
    return result


def test_prompt_logprobs_cover_every_position_but_the_first_once() -> None:
    steps = chunks(state(9, prompt_logprobs=0), [4, 1, 4])
    assert [list(positions) for positions, _ in steps] == [[1, 2, 3, 4], [5], [6, 7, 8]]
    assert [batch.prompt_rows.tolist() for _, batch in steps] == [[0, 1, 2, 3], [0], [0, 1, 2]]
    assert [batch.sample_rows.tolist() for _, batch in steps] == [[], [], [3]]


def test_a_recomputed_prompt_gives_no_logprob_twice() -> None:
    request = state(9, prompt_logprobs=1)
    request.num_prompt_logprobs = 4
    steps = chunks(request, [3, 6])
    assert [list(positions) for positions, _ in steps] == [[], [5, 6, 7, 8]]
    assert [batch.prompt_rows.tolist() for _, batch in steps] == [[], [1, 2, 3, 4]]


def test_prompt_rows_are_those_of_their_entries() -> None:
    asking = entry(state(6, prompt_logprobs=0), 2, 3, [0, 1])
    batch = build_batch(Plan((entry(state(9), 0, 7, [2, 3]), asking, asking)), BLOCK_SIZE)
    assert batch.prompt_rows.tolist() == [7, 8, 9, 10, 11, 12]


def test_a_recomputed_output_has_no_prompt_positions() -> None:
    request = state(5, 4, prompt_logprobs=1)
    assert list(prompt_logprob_positions(entry(request, 2, 7, [0, 1, 2]))) == [3, 4]
    assert not prompt_logprob_positions(entry(request, 4, 5, [0, 1, 2]))
    assert not prompt_logprob_positions(entry(request, 8, 1, [0, 1, 2]))
