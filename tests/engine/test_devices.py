"""On which GPUs ranks compute, and in which type, on machines that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantd.engine.config import EngineConfig
from quantd.engine.devices import compute_dtype, plan_ranks
from quantd.engine.errors import RequestError
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.spec import DecoderSpec

CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
}
ADA, TURING, PASCAL = ("RTX 4060", (8, 9)), ("RTX 2060", (7, 5)), ("GTX 1080", (6, 1))


@pytest.fixture
def spec() -> DecoderSpec:
    return decoder_spec(CONFIG)


def machine_of(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, tuple[int, int]]) -> list[torch.device]:
    """A machine with these GPUs."""
    devices = [torch.device("cuda", i) for i in range(len(gpus))]

    def number(device: torch.device | int) -> int:
        return device if isinstance(device, int) else device.index

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpus[number(device)][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[number(device)][1])
    return devices


@pytest.mark.parametrize(
    ("model_config", "dtype"),
    [
        ({}, torch.float16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": None}, torch.bfloat16),
    ],
)
def test_activations_have_the_type_of_the_checkpoint(
    model_config: dict[str, Any], dtype: torch.dtype, spec: DecoderSpec
) -> None:
    here = [torch.device("cpu")]
    assert compute_dtype(model_config, spec, here) == dtype
    assert compute_dtype(model_config, replace(spec, model_type="gemma2"), here) == torch.bfloat16


def test_gpus_that_exchange_activations_have_them_in_one_type(
    monkeypatch: pytest.MonkeyPatch, spec: DecoderSpec
) -> None:
    model = {"dtype": "bfloat16"}
    new, old = machine_of(monkeypatch, ADA, TURING)
    assert compute_dtype(model, spec, [new]) == torch.bfloat16
    assert compute_dtype(model, spec, [old]) == torch.float16
    assert compute_dtype(model, spec, [new, old]) == compute_dtype(model, spec, [old, new]) == torch.float16


def test_a_rank_s_gpu_that_is_too_old_is_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, spec: DecoderSpec
) -> None:
    machine_of(monkeypatch, TURING, PASCAL)
    config = EngineConfig(model_path="", backend="gpu")
    assert plan_ranks(config, spec, 1).size == 1
    for options in ({"tp": 2}, {"split": "1,1"}):
        with pytest.raises(RequestError, match=r"GTX 1080 is .* 6\.1, 7\.5 is the least.*CUDA_VISIBLE"):
            plan_ranks(EngineConfig(model_path="", backend="gpu", **options), spec, 1)
