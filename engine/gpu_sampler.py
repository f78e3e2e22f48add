"""The sampler's sibling for logits on a GPU, which they need not leave: tokens are drawn there.

A row's token follows from its logits and its request alone, as with Sampler; the random streams are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from quantd.engine.forward import moved
from quantd.engine.logprobs import token_logprob
from quantd.engine.plan import RequestState
from quantd.engine.request import TokenLogprob
from quantd.engine.sampler import NOT_FINITE, NOTHING_ALLOWED, Sample, cut_of
from quantd.kernels.gpu.sampling import sample
from quantd.kernels.gpu.sampling_inputs import Adjustment, Draw, Edits, SamplingInputs, Status
from quantd.kernels.shortlist import Row

_ERRORS = {Status.NOT_FINITE: NOT_FINITE, Status.NOTHING_ALLOWED: NOTHING_ALLOWED}


class GpuSampler:
    """Draws the next token of each request."""

    def sample(self, logits: Tensor, requests: Sequence[RequestState]) -> list[Sample]:
        """logits: float32 [R, V] on the device, row r for requests[r].

        Tokens, their log probabilities and what went wrong come to the CPU, and the rows of those that ask
        for the likeliest tokens.
        """
        draws = [_draw(state, logits.shape[1]) for state in requests]
        inputs = SamplingInputs.of(draws, "cpu", [_adjustment(state) for state in requests])
        token_ids, logprobs, status = sample(logits, _moved(inputs, logits.device))
        packed = torch.stack((token_ids, logprobs.view(torch.int32), status)).cpu()
        rows = _rows_with_top(logits, requests)
        results = zip(
            packed[0].tolist(), packed[1].view(torch.float32).tolist(), packed[2].tolist(), strict=True
        )
        return [
            _sample(*result, state, rows.get(i))
            for i, (result, state) in enumerate(zip(results, requests, strict=True))
        ]


def _moved(inputs: SamplingInputs, device: torch.device) -> SamplingInputs:
    """On the device, without waiting for the step that computes there."""
    own, edits = _tensors(inputs), {} if inputs.edits is None else _tensors(inputs.edits)
    places = iter(moved([*own.values(), *edits.values()], device))
    # Tensors for tensors, by their names, which no type says.
    on_device: dict[str, Any] = {name: next(places) for name in own}
    if inputs.edits is not None:
        edits_there: dict[str, Any] = {name: next(places) for name in edits}
        on_device["edits"] = replace(inputs.edits, **edits_there)
    return replace(inputs, **on_device)


def _tensors(record: SamplingInputs | Edits) -> dict[str, Tensor]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _draw(state: RequestState, vocab_size: int) -> Draw:
    cut = cut_of(state.request.sampling, vocab_size)
    return Draw(
        temperature=cut.temperature,
        seed=state.seed,
        position=len(state.output),
        top_k=cut.top_k,
        top_p=cut.top_p,
        min_p=cut.min_p,
    )


def _adjustment(state: RequestState) -> Adjustment | None:
    """What the request has changed in its logits, if anything; see quantd.engine.penalties."""
    params = state.request.sampling
    repeats = params.repetition_penalty != 1
    counts = params.frequency_penalty != 0 or params.presence_penalty != 0
    masked = params.stop_token_ids if len(state.output) < params.min_tokens else ()
    bias = params.logit_bias | dict.fromkeys(masked, -torch.inf)
    if not (repeats or counts or bias):
        return None
    return Adjustment(
        bias=bias,
        seen=set(state.tokens(0, state.num_tokens)) if repeats else (),
        output=state.output if counts else (),
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )


def _rows_with_top(logits: Tensor, requests: Sequence[RequestState]) -> dict[int, Row]:
    """The rows [V] of requests that ask for the likeliest tokens, by their numbers."""
    asking = [i for i, state in enumerate(requests) if state.request.sampling.logprobs]
    if not asking:
        return {}
    rows = logits[torch.tensor(asking, device=logits.device)].cpu().numpy()
    return dict(zip(asking, rows, strict=True))


def _sample(token_id: int, logprob: float, status: int, state: RequestState, row: Row | None) -> Sample:
    if status != Status.DRAWN:
        return Sample(error=_ERRORS[Status(status)])
    num_top = state.request.sampling.logprobs
    if num_top is None:
        return Sample(token_id)
    if row is None:
        return Sample(token_id, TokenLogprob(token_id, logprob))
    return Sample(token_id, token_logprob(row, token_id, num_top))
