"""Every architecture against transformers: tiny random models in float32, all logits of several prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from model_oracle import FakeCheckpoint, random_model, relative_error, run_steps
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.weights import load_weights
from quantd.kernels.reference import ReferenceOps

TOLERANCE = 1e-4
TINY = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 93,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """A transformers config as its differences from TINY; lengths of the prompts to compare."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (70, 37, 5)
    max_model_len: int | None = None


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


# Beyond the trained length, which transformers takes for the whole batch.
LONG = (70, 41, 33)
FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.1, 2.0, 4.0, 8.0]}
LONGROPE = {
    "original_max_position_embeddings": 32,
    **rope("longrope", partial_rotary_factor=0.5, **FACTORS),
}

CASES = {
    "llama": Case("llama"),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}),
    "llama-linear": Case("llama", rope("linear", factor=4.0)),
    "llama-dynamic": Case(
        "llama", {**rope("dynamic", factor=3.0), "max_position_embeddings": 32}, LONG, max_model_len=70
    ),
    "llama-dynamic-short": Case(
        "llama", {**rope("dynamic", factor=3.0), "max_position_embeddings": 80}, max_model_len=70
    ),
    "llama-llama3": Case(
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": Case("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-options": Case(
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    ),
    "mistral": Case("mistral", {"sliding_window": 19}),
    "mistral-full": Case("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": Case("qwen2"),
    "qwen2-window": Case("qwen2", {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {"head_dim": 24}),
    "smollm3": Case("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-list": Case(
        "smollm3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 11}
    ),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "phi3": Case("phi3", {**rope("default", partial_rotary_factor=0.5), "sliding_window": 23}),
    "phi3-long": Case("phi3", LONGROPE, LONG),
    "phi3-short": Case("phi3", LONGROPE, (31, 7), max_model_len=32),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 30,
            "sliding_window": 17,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 30,
            "sliding_window": 17,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def prompts_of(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 101, (n,), generator=generator).tolist() for n in case.lengths]


def theirs_alone(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def theirs_padded(model: PreTrainedModel, prompts: list[list[int]]) -> list[Tensor]:
    """A batch padded on the left, as generate() would run it."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return [rows[width - len(p) :] for rows, p in zip(logits, prompts, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    case = CASES[name]
    model = random_model(AutoConfig.for_model(case.model_type, **{**TINY, **case.options}))
    checkpoint = FakeCheckpoint.of(model)
    spec = decoder_spec(checkpoint.config, case.max_model_len)
    ops = ReferenceOps()
    decoder = Decoder(spec, load_weights(spec, checkpoint, ops, lambda done, total: None), ops)

    prompts = prompts_of(case)
    alone = [theirs_alone(model, prompt) for prompt in prompts]
    whole = [(r, 0, len(p)) for r, p in enumerate(prompts)]
    singles = run_steps(decoder, prompts, [[chunk] for chunk in whole])
    batched = run_steps(decoder, prompts, [whole])
    # Requests start one step apart, in chunks of 9, so that prefill and decode stand in one batch.
    edges = [
        [(r, start, min(start + 9, len(p))) for start in range(0, len(p), 9)] for r, p in enumerate(prompts)
    ]
    steps = [
        [chunks[t - r] for r, chunks in enumerate(edges) if 0 <= t - r < len(chunks)]
        for t in range(max(len(chunks) + r for r, chunks in enumerate(edges)))
    ]
    chunked = run_steps(decoder, prompts, steps)

    for r, expected in enumerate(alone):
        assert relative_error(singles[r], expected) <= TOLERANCE
        assert relative_error(batched[r], expected) <= TOLERANCE
        assert relative_error(chunked[r], expected) <= TOLERANCE
    for ours, expected in zip(batched, theirs_padded(model, prompts), strict=True):
        assert relative_error(ours, expected) <= TOLERANCE
