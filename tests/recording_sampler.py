"""A sampler that keeps the logits that it draws from, to be compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantd.engine.plan import RequestState
from quantd.engine.sampler import Sample, Sampler
from quantd.engine.token_masks import NO_MASKS, Masks


class RecordingSampler(Sampler):
    """Keeps the logits that each token was drawn from, by request and place."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, int], Tensor] = {}

    def sample(
        self, logits: Tensor, requests: Sequence[RequestState], masks: Masks = NO_MASKS
    ) -> list[Sample]:
        for row, state in zip(logits, requests, strict=True):
            self.rows[state.id, len(state.output)] = row.clone()
        return super().sample(logits, requests, masks)

    def logits_of(self, name: str) -> Tensor:
        """[tokens drawn, V]"""
        return torch.stack([row for (id, _), row in sorted(self.rows.items()) if id == name])
