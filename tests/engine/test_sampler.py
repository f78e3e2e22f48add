"""Drawing tokens: against transformers' processors, exact distributions and plain numpy."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quantd.engine.grammar import Matcher
from quantd.engine.logprobs import largest, token_logprob
from quantd.engine.penalties import adjusted
from quantd.engine.plan import RequestState
from quantd.engine.random_stream import uniform
from quantd.engine.request import Request, SamplingParams
from quantd.engine.sampler import Sample, Sampler, Shortlists, cut_of, narrowed
from quantd.engine.token_masks import Masks
from quantd.kernels.cpu import load_ops
from quantd.kernels.shortlist import Cut, Shortlist, shortlists

VOCAB = 1000
PROMPT = [3, 5, 5, 8, 13]


def logits(rows: int = 1, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def state(output: list[int] | None = None, **sampling: Any) -> RequestState:
    params = SamplingParams(**sampling)
    return RequestState(Request(id="r", prompt=PROMPT, sampling=params), output=output or [])


def sample(row: torch.Tensor, request: RequestState) -> Sample:
    return Sampler().sample(row.view(1, -1), [request])[0]


def draws(row: torch.Tensor, count: int, **sampling: Any) -> list[int]:
    """Tokens of `count` independent streams."""
    return [sample(row, state(seed=seed, **sampling)).token_id for seed in range(count)]


def test_temperature_zero_is_the_argmax() -> None:
    rows = logits(7)
    samples = Sampler().sample(rows, [state(temperature=0.0) for _ in range(7)])
    assert [s.token_id for s in samples] == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-3])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    row = logits() * 1000
    assert draws(row, 5, temperature=temperature) == [int(row.argmax())] * 5


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(sampling: dict[str, Any]) -> None:
    row, count = logits(vocab_size=20, seed=1) / 2, 8_000
    expected = expected_probabilities(row, **sampling) * count
    observed = np.bincount(draws(row, count, **sampling), minlength=20)
    assert not observed[expected == 0].any()
    likely = expected > 0
    chi_square = ((observed - expected)[likely] ** 2 / expected[likely]).sum()
    # The 99.99 % point of chi-square with at most 19 degrees of freedom is below 51.
    assert chi_square < 51


def expected_probabilities(row: torch.Tensor, temperature: float = 1.0, **filters: Any) -> Any:
    """transformers' warpers, in their order, then softmax in float64."""
    return warped(row / temperature, **filters).double().softmax(-1)[0].numpy()


def warped(row: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    warpers: list[LogitsProcessor] = []
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        row = warper(torch.zeros(1, 1, dtype=torch.long), row)
    return row


FILTERS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": VOCAB - 1},
    {"top_p": 0.0},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 1e-4},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.5},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 100, "top_p": 0.99, "min_p": 0.01},
]


@pytest.fixture(scope="module", params=["numpy", "C"])
def backend(request: pytest.FixtureRequest) -> Shortlists:
    """Where the logits are looked through."""
    if request.param == "numpy":
        return shortlists
    ops = load_ops("auto", 2)
    assert ops is not None, "there is a compiler where tests run"
    return ops.shortlists


def candidates(backend: Shortlists, row: torch.Tensor, **sampling: Any) -> list[int]:
    """The tokens that a request's sampling leaves."""
    cut = cut_of(SamplingParams(**sampling), row.numel())
    (short,) = backend([row.flatten().numpy()], [cut])
    return tokens_left(short, cut)


def tokens_left(short: Shortlist, cut: Cut) -> list[int]:
    """What a cut leaves of a shortlist."""
    assert short.weights is not None
    kept = narrowed(short.weights, short.total, cut)
    return (kept if short.ids is None else short.ids[kept]).tolist()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_filters_keep_what_transformers_keeps(
    filters: dict[str, Any], spread: float, backend: Shortlists
) -> None:
    row = logits(seed=3) * spread
    kept = warped(row, **filters)[0].isfinite().nonzero().flatten().tolist()
    assert candidates(backend, row, **filters) == kept


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [3, 16, 511, 513, 6001])
def test_backends_find_the_same_tokens(filters: dict[str, Any], vocab_size: int, backend: Shortlists) -> None:
    rows = logits(5, vocab_size, seed=vocab_size).numpy()
    cuts = [cut_of(SamplingParams(temperature=t, **filters), vocab_size) for t in (0.0, 0.3, 0.7, 1.0, 4.0)]
    for one, plain, cut in zip(backend(rows, cuts), shortlists(rows, cuts), cuts, strict=True):
        assert (one.largest, one.best, one.finite) == (plain.largest, plain.best, True)
        if cut.temperature == 0:
            continue
        assert one.total == pytest.approx(plain.total, rel=1e-5)
        assert tokens_left(one, cut) == tokens_left(plain, cut)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 999])
def test_what_is_not_finite_is_seen(bad: float, place: int, backend: Shortlists) -> None:
    rows = logits(2).numpy()
    rows[1, place] = bad
    for temperature in (0.0, 1.0):
        cut = cut_of(SamplingParams(temperature=temperature, min_p=0.1), VOCAB)
        assert [short.finite for short in backend(rows, [cut, cut])] == [True, False]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    row = logits()
    assert draws(row, 50, top_k=2**63 - 1) == draws(row, 50, top_k=VOCAB)
    assert draws(row, 50, top_k=-1) == draws(row, 50)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}], ids=str)
def test_the_tightest_filters_are_greedy(filters: dict[str, Any]) -> None:
    row = logits()
    assert draws(row, 20, temperature=5.0, **filters) == [int(row.argmax())] * 20


def test_among_equals_the_lower_ids_stay(backend: Shortlists) -> None:
    flat = np.ones(10, np.float32)
    assert candidates(backend, torch.ones(10), top_k=3) == [0, 1, 2]
    assert candidates(backend, torch.ones(10), top_p=0.35) == [0, 1, 2, 3]
    assert largest(flat, 2).tolist() == [0, 1]
    assert [i for i, _ in token_logprob(np.array([0, 2, 1, 2], np.float32), 0, 3).top] == [1, 3, 2]


def test_repetition_penalty_equals_transformers_over_prompt_and_output() -> None:
    row, output = logits(), [8, 21, 21]
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.3)
    expected = processor(torch.tensor([PROMPT + output]), row.clone())
    result = adjusted(row[0].numpy(), state(output, repetition_penalty=1.3))
    np.testing.assert_allclose(result, expected[0].numpy(), rtol=1e-6)


def test_tokens_are_counted_as_the_output_grows() -> None:
    request = state()
    for number in (0, 3, 3, 9):
        request.output += [(number * i * i) % 17 for i in range(len(request.output), number)]
        known = request.token_counts
        assert known.token_ids.tolist() == sorted({*PROMPT, *request.output})
        assert known.counts.tolist() == [request.output.count(token) for token in known.token_ids]


def test_count_penalties_look_at_the_output_alone() -> None:
    row = logits()[0].numpy()
    expected = row.copy()
    expected[21] -= 2 * 0.5 + 0.25
    expected[8] -= 0.5 + 0.25
    request = state([21, 8, 21], frequency_penalty=0.5, presence_penalty=0.25)
    np.testing.assert_allclose(adjusted(row, request), expected, rtol=1e-6)
    assert adjusted(row, state([], frequency_penalty=0.5)) is row


def test_penalties_do_not_change_the_logits_they_were_given() -> None:
    row = logits()
    before = row.clone()
    sample(row, state([4], repetition_penalty=2.0, logit_bias={7: 3.0}, min_tokens=3, stop_token_ids=(1,)))
    assert torch.equal(row, before)


def test_a_bias_decides() -> None:
    row = logits() / 10
    assert draws(row, 20, logit_bias={17: 100.0}) == [17] * 20
    assert int(row.argmax()) not in draws(row, 200, logit_bias={int(row.argmax()): -100.0})


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_the_same_bias_on_every_token_changes_nothing_but_rounding(bias: float) -> None:
    row = logits()
    everywhere = dict.fromkeys(range(VOCAB), bias)
    assert draws(row, 50, logit_bias=everywhere) == draws(row, 50)


def test_stop_ids_are_masked_until_min_tokens() -> None:
    row = logits()
    stop = int(row.argmax())
    params = {"min_tokens": 2, "stop_token_ids": (stop,)}
    for output in ([], [1]):
        assert stop not in {sample(row, state(output, temperature=0.0, **params)).token_id}
        assert all(
            sample(row, state(output, seed=seed, top_k=1, **params)).token_id != stop for seed in range(20)
        )
    assert sample(row, state([1, 1], temperature=0.0, **params)).token_id == stop


def test_a_request_that_masks_the_whole_vocabulary_ends_alone() -> None:
    hopeless = state(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    samples = Sampler().sample(logits(2), [hopeless, state(temperature=0.0)])
    assert samples[0].error is not None and "min_tokens" in samples[0].error
    assert samples[1].error is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_ends_alone(value: float) -> None:
    rows = logits(3)
    rows[1, 400] = value
    samples = Sampler().sample(rows, [state(temperature=t) for t in (0.0, 1.0, 1.0)])
    assert [s.error is None for s in samples] == [True, False, True]
    assert samples[1].error is not None and "not finite" in samples[1].error


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 7},
    {"seed": 7, "top_k": 10, "top_p": 0.9, "min_p": 0.01},
    {"seed": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 2, "logit_bias": {9: 2.0}},
]


def test_a_row_never_depends_on_the_others() -> None:
    rows = logits(len(MIXED), vocab_size=49_152, seed=5)
    requests = [state([1, 2, 2], **sampling) for sampling in MIXED]
    together = Sampler().sample(rows, requests)
    order = [3, 0, 4, 2, 1]
    assert [Sampler().sample(rows[[i]], [requests[i]])[0] for i in range(len(MIXED))] == together
    shuffled = Sampler().sample(rows[order], [requests[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_the_same_seed_draws_the_same_and_a_position_draws_anew() -> None:
    row = torch.zeros(1, VOCAB)
    first = [sample(row, state([0] * n, seed=11)).token_id for n in range(20)]
    assert first == [sample(row, state([0] * n, seed=11)).token_id for n in range(20)]
    assert len(set(first)) > 15
    assert first != [sample(row, state([0] * n, seed=12)).token_id for n in range(20)]


def test_without_a_seed_each_request_has_its_own_stream() -> None:
    row = torch.zeros(1, VOCAB)
    request = state()
    assert sample(row, request) == sample(row, request)
    assert len({sample(row, state()).token_id for _ in range(20)}) > 10


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_int64_seed_gives_uniform_numbers(seed: int) -> None:
    numbers = np.array([uniform(seed, position) for position in range(4000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.bincount((numbers * 20).astype(int), minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 51


def test_logprobs_are_those_of_the_raw_logits() -> None:
    row = logits(vocab_size=49_152)
    request = state([4, 4], seed=3, temperature=0.7, top_k=50, frequency_penalty=2.0, logprobs=5)
    result = sample(row, request)
    assert result.logprob is not None
    expected = row.double().log_softmax(-1)[0]
    values, ids = expected.topk(5)
    assert result.logprob.token_id == result.token_id
    assert result.logprob.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-6)
    assert [i for i, _ in result.logprob.top] == ids.tolist()
    assert [p for _, p in result.logprob.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_logprobs_zero_gives_the_chosen_token_alone_and_none_gives_nothing() -> None:
    row = logits()
    asked = sample(row, state(temperature=0.0, logprobs=0)).logprob
    assert asked is not None and asked.top == []
    assert sample(row, state(temperature=0.0)).logprob is None


def test_more_logprobs_than_tokens_gives_the_vocabulary() -> None:
    assert len(token_logprob(np.arange(6, dtype=np.float32), 2, 20).top) == 6


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    row = torch.full((1, 2000), -1000.0)
    row[0, 1500] = 0.0
    assert set(draws(row, 100)) == {1500}


def test_top_p_cuts_also_where_fewer_tokens_than_top_k_weigh_anything(backend: Shortlists) -> None:
    """The others are so unlikely that their weights are zero; the list is too long for C's."""
    row = torch.full((1, 9000), -900.0)
    row[0, [5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])
    assert candidates(backend, row, top_k=50, top_p=0.7) == [5, 6]
    requests = [state(top_k=50, top_p=0.5, seed=seed) for seed in range(20)]
    assert {one.token_id for one in Sampler(backend).sample(row.expand(20, -1), requests)} == {5}


def masked_by(masks: npt.NDArray[np.bool_]) -> Masks:
    """masks: [R, V]"""
    return Masks(np.packbits(masks, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, *FILTERS], ids=str)
@pytest.mark.parametrize("num_allowed", [1, 7, 400, VOCAB])
def test_a_mask_is_as_if_there_were_no_other_tokens(
    backend: Shortlists, sampling: dict[str, Any], num_allowed: int
) -> None:
    """The oracle has a vocabulary of the allowed tokens alone. Log probabilities are of all tokens."""
    rows, generator = logits(rows=6), np.random.default_rng(num_allowed)
    kept = np.sort(generator.choice(VOCAB, num_allowed, replace=False))
    mask = np.zeros((6, -(-VOCAB // 32) * 32), np.bool_)
    mask[:, kept] = True
    mask[5] = True
    requests = [state(seed=seed, logprobs=2, **sampling) for seed in range(6)]
    for request in requests[:5]:
        request.matcher = cast(Matcher, object())
    ours = Sampler(backend).sample(rows, requests, masked_by(mask))
    theirs = Sampler(backend).sample(rows[:, torch.from_numpy(kept)], requests)
    assert [one.token_id for one in ours[:5]] == [int(kept[other.token_id]) for other in theirs[:5]]
    for row, one in zip(rows.numpy(), ours, strict=True):
        assert one.logprob == token_logprob(row, one.token_id, 2)
    assert ours[5] == sample(rows[5], requests[5])


def test_a_mask_goes_before_penalties_and_beside_faults() -> None:
    rows = logits(rows=3)
    rows[1, 500] = torch.nan
    mask = np.zeros((3, 1024), np.bool_)
    mask[:2, [8, 9]] = True
    params = {"temperature": 0.0, "repetition_penalty": 100.0, "logit_bias": {5: 100.0, 8: 100.0}}
    requests = [state(**params) for _ in range(3)]
    for request in requests:
        request.matcher = cast(Matcher, object())
    good, not_finite, nothing = Sampler().sample(rows, requests, masked_by(mask))
    # 8 was in the prompt: its bias is as good as taken back.
    assert (good.token_id, good.error) == (9 if rows[0, 9] > 1 + rows[0, 8] / 100 else 8, None)
    assert not_finite.error is not None and "not finite" in not_finite.error
    assert nothing.error is not None
