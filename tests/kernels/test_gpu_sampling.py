"""Drawing on the GPU against the engine's sampler: the same candidates, and the noise that a seed gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quantd.engine.logprobs import token_logprob
from quantd.engine.penalties import adjusted
from quantd.engine.plan import RequestState
from quantd.engine.request import Request, SamplingParams
from quantd.engine.sampler import cut_of, narrowed
from quantd.kernels.gpu import sampling
from quantd.kernels.gpu.sampling import sample
from quantd.kernels.gpu.sampling_inputs import Adjustment, Draw, Edits, Samples, SamplingInputs, Status

VOCAB = 500
PROMPT = [3, 5, 5, 8, 13, 499]
OUTPUT = [13, 7, 7, 7, 300]
Floats = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, poisoned_outputs: None) -> None:
    """Two chunks a row, the last one not full."""
    monkeypatch.setattr(sampling, "_CHUNK", 256)
    monkeypatch.setattr(sampling, "_TILE", 256)


def logits(rows: int, vocab_size: int = VOCAB, step: float = 0.0) -> torch.Tensor:
    """step: between the values there are, so that many tokens are level."""
    x = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    return (x / step).round() * step if step else x


def state(seed: int = 0, output: list[int] | None = None, **params: Any) -> RequestState:
    request = Request(id="r", prompt=PROMPT, sampling=SamplingParams(seed=seed, **params))
    return RequestState(request, output=OUTPUT if output is None else output)


def draw_of(asked: RequestState) -> Draw:
    params = asked.request.sampling
    position = len(asked.output)
    return Draw(params.temperature, asked.seed, position, params.top_k, params.top_p, params.min_p)


def adjustment_of(asked: RequestState, place: int = -1) -> Adjustment:
    """place: of one more token of the output."""
    params = asked.request.sampling
    early = len(asked.output) + (place >= 0) < params.min_tokens
    seen = np.unique(np.array([*asked.request.prompt, *asked.output], np.int32))
    return Adjustment(
        bias=params.logit_bias | dict.fromkeys(params.stop_token_ids if early else (), -np.inf),
        seen=seen,
        counts=np.array([asked.output.count(token) for token in seen], np.int32),
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        place=place,
    )


def run(rows: torch.Tensor, states: list[RequestState], device: str, mask: Any = None) -> Samples:
    draws, adjustments = [draw_of(s) for s in states], [adjustment_of(s) for s in states]
    mask = None if mask is None else mask.to(device)
    samples = sample(rows.to(device), SamplingInputs.of(draws, device, adjustments, mask))
    return Samples(*(part.cpu() for part in samples))


def philox(seed: int, ids: npt.NDArray[np.int64], position: int) -> npt.NDArray[np.uint64]:
    """The first word of Philox4x32-10 (Salmon et al., SC 2011) for each counter (id, position, 0, 0)."""
    low = np.uint64(0xFFFFFFFF)
    c = [ids.astype(np.uint64), np.uint64(position), np.uint64(0), np.uint64(0)]
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        high_a, high_b = a >> np.uint64(32), b >> np.uint64(32)
        c = [high_b ^ c[1] ^ np.uint64(key[0]), b & low, high_a ^ c[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def expected_token(row: Floats, asked: RequestState) -> int:
    """By the engine's own adjustments and cuts; float64 noise."""
    x = adjusted(row, asked)
    cut = cut_of(asked.request.sampling, len(x))
    if cut.temperature == 0:
        return int(x.argmax())
    scaled = (x - x.max()) / np.float32(cut.temperature)
    weights = np.exp(scaled)
    ids = narrowed(weights, weights.sum(dtype=np.float64), cut)
    uniform = (philox(asked.seed, ids, len(asked.output)) + 0.5) / 2**32
    return int(ids[np.argmax(scaled[ids] - np.log(-np.log1p(-uniform)))])


PENALTIES: list[dict[str, Any]] = [
    {},
    {"logit_bias": {5: 20.0, 7: -3.0}},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"frequency_penalty": 1.5, "presence_penalty": 0.25},
    {"stop_token_ids": (1, 2, 3), "min_tokens": 9},
    {
        "logit_bias": {13: 9.0, 300: 2.0, 0: 1.0},
        "repetition_penalty": 1.1,
        "presence_penalty": -2.0,
        "stop_token_ids": tuple(range(100)),
        "min_tokens": 6,
    },
]
CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 40, "temperature": 5.0},
    {"top_k": VOCAB + 5, "temperature": 5.0},
    {"top_p": 0.0},
    {"top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.1, "temperature": 3.0},
    {"top_k": 9, "top_p": 0.6, "temperature": 4.0},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "temperature": 2.0, "repetition_penalty": 1.3},
    {"temperature": 1e-6, "top_k": 3},
]


def test_greedy_tokens_and_logprobs_are_the_engine_s(gpu_device: str) -> None:
    rows = logits(len(PENALTIES))
    states = [state(temperature=0.0, **params) for params in PENALTIES]
    samples = run(rows, states, gpu_device)
    tokens = [expected_token(row, asked) for row, asked in zip(rows.numpy(), states, strict=True)]
    assert samples.token_ids.tolist() == tokens
    assert len(set(samples.token_ids.tolist())) > 3
    logprobs = [token_logprob(row, token, 0).logprob for row, token in zip(rows.numpy(), tokens, strict=True)]
    torch.testing.assert_close(samples.logprobs, torch.tensor(logprobs), rtol=1e-6, atol=2e-6)
    assert samples.status.tolist() == [Status.DRAWN] * len(rows)


@pytest.mark.parametrize(("step", "cuts"), [(0.0, CUTS), (1.5, CUTS[-5:-1])], ids=["all", "ties"])
def test_draws_are_the_noisiest_of_the_engine_s_candidates(
    gpu_device: str, step: float, cuts: list[dict[str, Any]]
) -> None:
    rows = logits(len(cuts), step=step)
    states = [state(seed=7 - 5 * r, **params) for r, params in enumerate(cuts)]
    samples = run(rows, states, gpu_device)
    tokens = [expected_token(row, asked) for row, asked in zip(rows.numpy(), states, strict=True)]
    assert samples.token_ids.tolist() == tokens
    assert (samples.token_ids != rows.argmax(1)).sum() > 1


def test_a_token_that_only_the_device_knows_counts_as_if_all_knew_it(
    gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, behind, between and among the tokens known, of which four go to a program; bit for bit.

    Of some it is the first one, and some have none; the others find theirs in another order.
    """
    monkeypatch.setattr(sampling, "_EDIT_BLOCK", 4)
    kinds = [PENALTIES[4], PENALTIES[6], {"repetition_penalty": 1.2, "frequency_penalty": 0.3}]
    asked = [(kind, latest) for kind in kinds for latest in (0, 3, 7, 8, 9, 499)]
    rows, outputs = logits(len(asked)), [[] if r % 5 == 4 else OUTPUT for r in range(len(asked))]
    drawn = torch.tensor([latest for _, latest in reversed(asked)], dtype=torch.int32)
    places = [-1 if r % 7 == 6 else len(asked) - 1 - r for r in range(len(asked))]
    adjustments = [
        adjustment_of(state(output=output, **kind), place)
        for (kind, _), output, place in zip(asked, outputs, places, strict=True)
    ]
    edits = Edits.of(adjustments, gpu_device)
    assert edits is not None
    edited = sampling._edited(rows.to(gpu_device), edits, drawn.to(gpu_device)).cpu().numpy()
    for r, (kind, latest) in enumerate(asked):
        known = state(output=outputs[r] if places[r] < 0 else [*outputs[r], latest], **kind)
        np.testing.assert_array_equal(edited[r], adjusted(rows[r].numpy(), known), err_msg=str(asked[r]))


def test_a_row_does_not_depend_on_its_company(gpu_device: str) -> None:
    cuts = [CUTS[i] for i in (2, 5, 7, 9)]
    rows = logits(len(cuts))
    states = [state(seed=r, **params) for r, params in enumerate(cuts)]
    whole = run(rows, states, gpu_device)
    for r in range(len(cuts)):
        alone = run(rows[r : r + 1], states[r : r + 1], gpu_device)
        assert all(torch.equal(one[0], all[r]) for one, all in zip(alone, whole, strict=True))


def test_a_real_vocabulary_s_chunks(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows, asked = logits(1, 4500), state(top_p=0.99, temperature=3.0)
    assert run(rows, [asked], gpu_device).token_ids.tolist() == [expected_token(rows[0].numpy(), asked)]


def test_the_mask_forbids(gpu_device: str) -> None:
    rows = logits(3)
    rows[:, 499] += 50
    allowed = torch.rand(3, 640, generator=torch.Generator().manual_seed(2)) < 0.2
    allowed[1] = True
    bits = allowed.view(3, 20, 32).numpy()
    mask = torch.from_numpy(np.packbits(bits, axis=2, bitorder="little").view(np.int32).reshape(3, 20))
    states = [state(temperature=t) for t in (0.0, 0.0, 1.0)]
    tokens = run(rows, states, gpu_device, mask).token_ids.tolist()
    masked = rows.masked_fill(~allowed[:, :VOCAB], -torch.inf).numpy()
    assert tokens == [expected_token(row, asked) for row, asked in zip(masked, states, strict=True)]
    assert tokens[1] == 499


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_faulty_row_says_so_and_spoils_no_other(gpu_device: str, temperature: float) -> None:
    rows = logits(6)
    rows[1, 499], rows[2, 0], rows[3, 300] = torch.nan, torch.inf, -torch.inf
    states = [state(temperature=temperature) for _ in range(6)]
    forbidden = state(temperature=temperature, stop_token_ids=tuple(range(VOCAB)), min_tokens=9)
    states[4] = forbidden
    samples = run(rows, states, gpu_device)
    assert samples.status.tolist() == [
        Status.DRAWN,
        *[Status.NOT_FINITE] * 3,
        Status.NOTHING_ALLOWED,
        Status.DRAWN,
    ]
    assert samples.token_ids[1:5].tolist() == [0, 0, 0, 0]
    for r in (0, 5):
        assert samples.token_ids[r] == expected_token(rows[r].numpy(), states[r])


def test_the_noise_gives_the_softmax() -> None:
    """Of the oracle that the draws above equal: the kernels would take long for so many."""
    row, count = logits(1, 20)[0] / 2, 8_000
    expected = (row / 1.5).softmax(0).numpy() * count
    scaled = (row / 1.5).numpy()
    ids = np.arange(20)
    draws = []
    for seed in range(count):
        uniform = (philox(seed * 2**31, ids, seed % 7) + 0.5) / 2**32
        draws.append(np.argmax(scaled - np.log(-np.log1p(-uniform))))
    observed = np.bincount(draws, minlength=20)
    # The 99.99 % point of chi-square with 19 degrees of freedom is below 51.
    assert ((observed - expected) ** 2 / expected).sum() < 51


def test_no_rows(gpu_device: str) -> None:
    samples = run(torch.empty(0, VOCAB), [], gpu_device)
    assert [len(part) for part in samples] == [0, 0, 0]
