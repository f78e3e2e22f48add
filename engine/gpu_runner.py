"""The runner of GPUs: its steps are started, and compute while the CPU does something else.

Everything that a step needs goes to a GPU in the order of the starts, on one stream, so a step finds what
the one before it wrote, and nobody waits before a result is asked for. So it is on every rank: what ranks
exchange, the tokens drawn on rank 0 too, passes from GPU to GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count

import torch
from torch import Tensor

from quantd.engine.batch import build_batch
from quantd.engine.forward import moved
from quantd.engine.gpu_sampler import GpuDrawing, GpuSampler
from quantd.engine.leading import LeadingPart
from quantd.engine.messages import ModelInfo
from quantd.engine.model_part import ModelPart
from quantd.engine.plan import Plan, PoolBlocks, RequestState, Started
from quantd.engine.runner import Drawing, Drawn, ModelRunner, Step
from quantd.engine.token_masks import Masks


class GpuRunner(ModelRunner):
    """The AheadRunner of a decoder (see quantd.engine.plan)."""

    def __init__(
        self, part: ModelPart | LeadingPart, info: ModelInfo, pool_blocks: PoolBlocks | None = None
    ) -> None:
        self._gpu_sampler = GpuSampler(part.time_limit)
        super().__init__(part, self._gpu_sampler, info, pool_blocks)

    @torch.inference_mode()
    def start(self, plan: Plan, before: Started | None = None) -> Step:
        """See AheadRunner."""
        batch = build_batch(plan, self.info.block_size)
        requests = [entry.request for entry in plan.entries if entry.ahead]
        drawn = _drawn_ids(before, requests) if requests else None
        return self._start(plan, batch, drawn)

    def _draw(self, plan: Plan, hidden: Tensor, masks: Future[Masks], drawn: Tensor | None) -> Drawing:
        drawing = [entry for entry in plan.entries if entry.samples]
        if not drawing:
            return Drawn([])
        logits = self._part.logits(hidden)
        place = count()
        places = [next(place) if entry.ahead else None for entry in drawing]
        return self._gpu_sampler.start(
            logits, [entry.request for entry in drawing], masks.result(), places, drawn
        )


def _drawn_ids(before: Started | None, requests: Sequence[RequestState]) -> Tensor:
    """int32 [A] on the device: what the step before draws for these requests, a token each."""
    assert isinstance(before, Step) and isinstance(before.drawing, GpuDrawing), before
    drawing = [entry.request for entry in before.plan.entries if entry.samples]
    rows = {request: row for row, request in enumerate(drawing)}
    wanted = [rows[request] for request in requests]
    # A request whose logits are not finite ends, but first it goes on, from the token 0 that it has there.
    ids = before.drawing.token_ids
    if wanted == list(range(len(ids))):
        return ids
    (index,) = moved([torch.tensor(wanted, dtype=torch.int32)], ids.device)
    return ids.index_select(0, index)
