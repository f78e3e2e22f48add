"""Checkpoints that other tools wrote, from the folder to the logits that their formats mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_oracle import run_steps
from safetensors.torch import load_file
from torch import Tensor

from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.weights import load_weights
from quantd.kernels.reference import Activations, ReferenceOps
from quantd.quant.checkpoint import open_checkpoint

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"
TOLERANCE = 2e-3


def logits_of(folder: Path, prompts: list[list[int]], activations: Activations = "auto") -> Tensor:
    checkpoint, ops = open_checkpoint(folder), ReferenceOps(activations)
    spec = decoder_spec(checkpoint.config)
    weights = load_weights(spec, checkpoint, ops, lambda done, total: None)
    chunks = [(r, 0, len(prompt)) for r, prompt in enumerate(prompts)]
    return torch.stack(run_steps(Decoder(spec, weights, ops), prompts, [chunks]))


def error_of(folder: Path, activations: Activations = "auto") -> float:
    """||ours - expected|| / ||expected||."""
    expected = load_file(folder / "expected.safetensors")
    ours = logits_of(folder, expected["input_ids"].tolist(), activations)
    return float((ours - expected["logits"]).norm() / expected["logits"].norm())


WEIGHT_ONLY = sorted(folder for folder in FIXTURES.iterdir() if folder.name != "ct-w8a8-dynamic")


@pytest.mark.parametrize("folder", WEIGHT_ONLY, ids=lambda folder: folder.name)
def test_logits_are_those_expected(folder: Path) -> None:
    assert error_of(folder) <= TOLERANCE


def compressed_tensors_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """As quantize_int8, by compressed-tensors' rule: 255 steps over twice the absmax, so 127.5 for 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127), scale


def test_inputs_are_rounded_where_the_checkpoint_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FIXTURES / "ct-w8a8-dynamic"
    unrounded, rounded = error_of(folder, "fp32"), error_of(folder)
    # What rounding to INT8 costs on random weights; two rules of rounding differ by as much.
    assert unrounded != rounded
    assert max(unrounded, rounded) < 0.06
    # With the writer's own rule what is left is an absmax of -127.5 steps, a tie that the last bit decides.
    monkeypatch.setattr("quantd.kernels.reference.quantize_int8", compressed_tensors_int8)
    assert error_of(folder) < 0.015
