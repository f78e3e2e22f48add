"""Drawing tokens where the logits are: adjusted, cut to top_k, top_p and min_p, and one token picked a row.

A row is cut into chunks of a fixed length and each program takes one chunk, so that a single row keeps
many multiprocessors busy; what chunks found is merged in order. No row is sorted. The smallest logit that
top_k or top_p keep is searched by its bits, four at a time from the top: each pass counts (or weighs) what
lies at or above 16 evenly spaced values, and the next goes on between two of them. Nothing is random but a
hash of (seed, position, token): the token with the largest logit / temperature plus Gumbel noise is a
draw from the softmax (Maddison et al., arXiv 1411.0030).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quantd.kernels.gpu.sampling_inputs import Edits, Samples, SamplingInputs
from quantd.kernels.gpu.sampling_kernels import (
    NUM_PASSES,
    NUM_STATS,
    edit_kernel,
    finish_kernel,
    goal_kernel,
    pick_kernel,
    search_kernel,
    survey_kernel,
)

_CHUNK = 4096
_TILE = 128  # tokens that are compared with the 16 values at a time
_EDIT_BLOCK = 256
_PICK_WARPS = 8  # the noise takes registers


def sample(logits: Tensor, inputs: SamplingInputs, drawn: Tensor | None = None) -> Samples:
    """A token of each row of logits, float32 [R, V], which stay as they are.

    drawn: int32 [A], where rows' adjustments find the tokens that only the device knows.
    """
    num_rows, device = len(logits), logits.device
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    samples = Samples(
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if num_rows > 0:
        step = _Step(logits, inputs, drawn)
        step.survey()
        if inputs.draws:
            step.draw()
        step.finish(samples)
    return samples


class _Step:
    """The launches for one batch of rows, and the tables that they hand on."""

    def __init__(self, logits: Tensor, inputs: SamplingInputs, drawn: Tensor | None) -> None:
        num_rows, vocab_size = logits.shape
        chunks = triton.cdiv(vocab_size, _CHUNK)
        words = 0
        if inputs.mask is not None:
            words = inputs.mask.shape[1]
            assert inputs.mask.is_contiguous() and words * 32 >= vocab_size, inputs.mask.shape
        self.logits, self.inputs = logits, inputs
        self.adjusted = logits if inputs.edits is None else _edited(logits, inputs.edits, drawn)
        self.grid = (num_rows, chunks)
        self.stats = torch.empty(num_rows, NUM_STATS, chunks, device=logits.device)
        self.goals = torch.empty(num_rows, 3, device=logits.device)
        self.named = torch.empty(num_rows, 2, chunks, dtype=torch.int32, device=logits.device)
        self.row = {"VOCAB": vocab_size, "WORDS": words, "CHUNK": _CHUNK}
        self.merge = {"CHUNKS": chunks, "SLOTS": triton.next_power_of_2(chunks)}
        self.tables: dict[str, Tensor | None] = dict.fromkeys(("k_prefix", "k_sums", "p_prefix", "p_sums"))

    def survey(self) -> None:
        survey_kernel[self.grid](
            self.logits,
            self.adjusted,
            self.inputs.mask,
            self.inputs.temperature,
            self.stats,
            self.named,
            **self.row,
        )

    def draw(self) -> None:
        inputs = self.inputs
        self._set_goals(for_p=False)
        if inputs.cuts_top_k:
            self._search("k", for_p=False)
        if inputs.cuts_top_p:
            self._set_goals(for_p=True)
            self._search("p", for_p=True)
        pick_kernel[self.grid](
            self.adjusted,
            inputs.mask,
            inputs.temperature,
            inputs.min_p,
            inputs.seed,
            inputs.position,
            self.stats,
            self.named,
            self.goals,
            **self.tables,
            **self.row,
            **self.merge,
            CUTS_K=inputs.cuts_top_k,
            CUTS_P=inputs.cuts_top_p,
            num_warps=_PICK_WARPS,
        )

    def _set_goals(self, for_p: bool) -> None:
        goal_kernel[self.grid[:1]](
            self.inputs.temperature,
            self.inputs.top_k,
            self.inputs.top_p,
            self.stats,
            self.goals,
            self.tables["k_prefix"],
            self.tables["k_sums"],
            VOCAB=self.row["VOCAB"],
            **self.merge,
            CUTS_K=self.inputs.cuts_top_k,
            FOR_P=for_p,
            num_warps=1,
        )

    def _search(self, what: str, for_p: bool) -> None:
        rows, chunks = self.grid
        device = self.logits.device
        prefix = torch.empty(NUM_PASSES + 1, rows, dtype=torch.int32, device=device)
        sums = torch.empty(2, rows, 2, chunks, 16, device=device)
        self.tables |= {f"{what}_prefix": prefix, f"{what}_sums": sums}
        for step in range(NUM_PASSES + 1):
            search_kernel[self.grid](
                self.adjusted,
                self.inputs.mask,
                self.inputs.temperature,
                self.goals,
                prefix,
                sums,
                step,
                **self.row,
                **self.merge,
                TILE=_TILE,
                FOR_P=for_p,
            )

    def finish(self, samples: Samples) -> None:
        finish_kernel[self.grid[:1]](
            self.logits,
            self.inputs.temperature,
            self.stats,
            self.named,
            *samples,
            VOCAB=self.row["VOCAB"],
            **self.merge,
            DRAWS=self.inputs.draws,
            num_warps=1,
        )


def _edited(logits: Tensor, edits: Edits, drawn: Tensor | None) -> Tensor:
    """A copy with the edits made."""
    out = logits.clone()
    grid = (len(logits), max(triton.cdiv(edits.longest, _EDIT_BLOCK), 1))
    edit_kernel[grid](
        out,
        edits.place if drawn is None else drawn,  # then no row has a place in it
        edits.start,
        edits.ids,
        edits.added,
        edits.divisor,
        edits.taken,
        edits.taken_again,
        edits.place,
        edits.repetition,
        edits.taken_once,
        VOCAB=logits.shape[1],
        BLOCK=_EDIT_BLOCK,
    )
    return out
