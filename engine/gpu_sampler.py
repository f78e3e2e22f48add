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
from quantd.engine.host_copy import HostCopy
from quantd.engine.logprobs import token_logprob
from quantd.engine.penalties import masked_ends
from quantd.engine.plan import RequestState
from quantd.engine.request import TokenLogprob
from quantd.engine.sampler import NOT_FINITE, NOTHING_ALLOWED, Sample, cut_of
from quantd.engine.token_masks import NO_MASKS, Masks
from quantd.kernels.gpu.sampling import sample
from quantd.kernels.gpu.sampling_inputs import Adjustment, Draw, Edits, SamplingInputs, Status
from quantd.kernels.shortlist import Row

_ERRORS = {Status.NOT_FINITE: NOT_FINITE, Status.NOTHING_ALLOWED: NOTHING_ALLOWED}


class GpuSampler:
    """Draws the next token of each request. time_limit: see HostCopy."""

    def __init__(self, time_limit: float | None = None) -> None:
        self._time_limit = time_limit

    def sample(
        self, logits: Tensor, requests: Sequence[RequestState], masks: Masks = NO_MASKS
    ) -> list[Sample]:
        """logits: float32 [R, V] on the device, row r for requests[r], as are the masks, on the CPU."""
        return self.start(logits, requests, masks, [None] * len(requests)).result()

    def start(
        self,
        logits: Tensor,
        requests: Sequence[RequestState],
        masks: Masks,
        places: Sequence[int | None],
        drawn: Tensor | None = None,
    ) -> GpuDrawing:
        """Start to draw. places: where in `drawn`, int32 [A] on the device, the latest token of each request
        is, which is not in its output yet; None: there is none.
        """
        pairs = list(zip(requests, places, strict=True))
        draws = [_draw(state, logits.shape[1], place) for state, place in pairs]
        adjustments = [_adjustment(state, place) for state, place in pairs]
        mask = None if masks.bits is None else torch.from_numpy(masks.bits)
        inputs = SamplingInputs.of(draws, "cpu", adjustments, mask)
        token_ids, logprobs, status = sample(logits, moved_inputs(inputs, logits.device), drawn)
        packed = self._copy(torch.stack((token_ids, logprobs.view(torch.int32), status)))
        with_top = [i for i, state in enumerate(requests) if state.request.sampling.logprobs]
        rows = {i: self._copy(logits[i]) for i in with_top}
        return GpuDrawing(requests, token_ids, packed, rows)

    def _copy(self, tensor: Tensor) -> HostCopy:
        return HostCopy(tensor, self._time_limit)


class GpuDrawing:
    """Tokens that are being drawn on a GPU.

    Tokens, their log probabilities and what went wrong come to the CPU, and the rows [V] of those that ask
    for the likeliest tokens, by their numbers. token_ids: int32 [R] on the device.
    """

    def __init__(
        self, requests: Sequence[RequestState], token_ids: Tensor, packed: HostCopy, rows: dict[int, HostCopy]
    ) -> None:
        self.token_ids = token_ids
        self._requests = requests
        self._packed = packed
        self._rows = rows

    def result(self) -> list[Sample]:
        """Wait for them. Raises TimeoutError."""
        token_ids, logprobs, status = self._packed.wait()
        results = zip(token_ids.tolist(), logprobs.view(torch.float32).tolist(), status.tolist(), strict=True)
        rows = {i: copy.wait().numpy() for i, copy in self._rows.items()}
        return [
            _sample(*result, state, rows.get(i))
            for i, (result, state) in enumerate(zip(results, self._requests, strict=True))
        ]


def moved_inputs(inputs: SamplingInputs, device: torch.device) -> SamplingInputs:
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


def _num_drawn(state: RequestState, place: int | None) -> int:
    return len(state.output) + (place is not None)


def _draw(state: RequestState, vocab_size: int, place: int | None) -> Draw:
    cut = cut_of(state.request.sampling, vocab_size)
    return Draw(
        temperature=cut.temperature,
        seed=state.seed,
        position=_num_drawn(state, place),
        top_k=cut.top_k,
        top_p=cut.top_p,
        min_p=cut.min_p,
    )


def _adjustment(state: RequestState, place: int | None) -> Adjustment | None:
    """What the request has changed in its logits, if anything; see quantd.engine.penalties."""
    params = state.request.sampling
    masked = masked_ends(state, _num_drawn(state, place))
    bias = params.logit_bias | dict.fromkeys(masked, -torch.inf)
    if not params.penalizes:
        return Adjustment(bias) if bias else None
    known = state.token_counts
    return Adjustment(
        bias=bias,
        seen=known.token_ids,
        counts=known.counts,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        place=-1 if place is None else place,
    )


def _sample(token_id: int, logprob: float, status: int, state: RequestState, row: Row | None) -> Sample:
    if status != Status.DRAWN:
        return Sample(error=_ERRORS[Status(status)])
    num_top = state.request.sampling.logprobs
    if num_top is None:
        return Sample(token_id)
    if row is None:
        return Sample(token_id, TokenLogprob(token_id, logprob))
    return Sample(token_id, token_logprob(row, token_id, num_top))
