"""A batch as a frame to other ranks, and back."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from quantd.engine.batch import Batch
from quantd.engine.rank_messages import Step
from quantd.kernels.ops import AttentionInputs

_ATTENTION = tuple(field.name for field in fields(AttentionInputs))
_ROWS = ("token_ids", "prompt_rows", "sample_rows")


def step_of(batch: Batch) -> Step:
    """The frame that holds a batch."""
    attention = {name: _bytes(getattr(batch.attention, name)) for name in _ATTENTION}
    return Step(**attention, **{name: _bytes(getattr(batch, name)) for name in _ROWS})


def batch_of(step: Step) -> Batch:
    """The batch in a frame."""
    attention = {name: _tensor(getattr(step, name)) for name in _ATTENTION}
    attention["block_tables"] = attention["block_tables"].view(len(attention["context_len"]), -1)
    return Batch(
        attention=AttentionInputs(**attention), **{name: _tensor(getattr(step, name)) for name in _ROWS}
    )


def _bytes(tensor: Tensor) -> bytearray:
    assert tensor.dtype == torch.int32, tensor.dtype
    return bytearray(tensor.numpy().tobytes())


def _tensor(data: bytearray) -> Tensor:
    # torch takes no empty buffer.
    return torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)
