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


def test_inputs_are_rounded_where_the_checkpoint_asks() -> None:
    """What is left is an absmax of -127.5 steps, a tie that the last bit of the input decides."""
    folder = FIXTURES / "ct-w8a8-dynamic"
    assert error_of(folder) < 0.015 < error_of(folder, "fp32")
