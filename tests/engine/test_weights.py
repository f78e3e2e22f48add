"""Loading: checked before read, joined where alike, side by side where not, tied once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from model_oracle import FakeCheckpoint, Pool, random_model, relative_error, run_steps
from torch import Tensor
from transformers import AutoConfig

from quantd.engine.errors import NumericsError
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.weights import DecoderWeights, load_weights
from quantd.kernels.reference import ReferenceOps
from quantd.kernels.weights import QuantizedWeight
from quantd.quant.errors import CheckpointError

PROMPT = [(7 * i) % 90 + 3 for i in range(21)]
OPS = ReferenceOps()


def make(model_type: str = "llama", **options: Any) -> FakeCheckpoint:
    tiny = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return FakeCheckpoint.of(random_model(AutoConfig.for_model(model_type, **{**tiny, **options})))


def load(checkpoint: FakeCheckpoint) -> DecoderWeights:
    return load_weights(decoder_spec(checkpoint.config), checkpoint, OPS, lambda done, total: None)


def decoder_of(checkpoint: FakeCheckpoint) -> Decoder:
    return Decoder(decoder_spec(checkpoint.config), load(checkpoint), OPS)


def logits_of(checkpoint: FakeCheckpoint) -> Tensor:
    return run_steps(decoder_of(checkpoint), [PROMPT], [[(0, 0, len(PROMPT))]])[0]


def quantize(
    checkpoint: FakeCheckpoint, module: str, bits: int, group_size: int, perm: Tensor | None = None
) -> None:
    """Replace a module by random codes, and leave its dequantized values for `dense_twin`."""
    n, k = checkpoint.tensors.pop(f"{module}.weight").shape
    groups = -(-k // group_size)
    generator = torch.Generator().manual_seed(len(checkpoint.weights))
    checkpoint.weights[module] = QuantizedWeight(
        torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator),
        torch.rand(n, groups, generator=generator) / 2**bits,
        torch.randn(n, groups, generator=generator) / 4,
        bits,
        group_size,
        perm,
    )


def dense_twin(checkpoint: FakeCheckpoint) -> FakeCheckpoint:
    dense = {f"{module}.weight": weight.dequantize() for module, weight in checkpoint.weights.items()}
    return FakeCheckpoint(checkpoint.config, {**checkpoint.tensors, **dense})


def attention(layer: int, *names: str) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{name}_proj" for name in names]


def test_pieces_are_joined_only_where_alike() -> None:
    """Case c21: layer 2's queries have 8 bits beside 4-bit keys and values; layer 1 is half plain."""
    checkpoint = make()
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    for module in attention(0, "q", "k", "v"):
        quantize(checkpoint, module, 4, 32, perm)
    quantize(checkpoint, "model.layers.1.mlp.up_proj", 4, 32)
    quantize(checkpoint, attention(1, "q")[0], 4, 32, perm)
    quantize(checkpoint, attention(1, "k")[0], 4, 32, perm.flip(0))
    quantize(checkpoint, attention(1, "v")[0], 4, 16, perm.flip(0))
    quantize(checkpoint, attention(2, "q")[0], 8, 64)
    for module in attention(2, "k", "v"):
        quantize(checkpoint, module, 4, 32)
    layers = load(checkpoint).layers
    shapes = [[piece.shape for piece in layer.qkv] for layer in layers]
    assert shapes == [[(128, 64)], [(64, 64), (32, 64), (32, 64)], [(64, 64), (64, 64)]]
    assert [len(layer.gate_up) for layer in layers] == [1, 2, 1]
    assert relative_error(logits_of(checkpoint), logits_of(dense_twin(checkpoint))) <= 1e-5


@pytest.mark.parametrize("unlike", [False, True], ids=["joined", "apart"])
def test_a_bias_that_only_the_tensors_tell_of_is_used(unlike: bool) -> None:
    expected = make(attention_bias=True)
    for name in ("k_proj", "o_proj"):
        for i in range(3):
            expected.tensors[f"model.layers.{i}.self_attn.{name}.bias"].zero_()
    checkpoint = FakeCheckpoint({**expected.config, "attention_bias": False}, dict(expected.tensors))
    for i in range(3):
        del checkpoint.tensors[f"model.layers.{i}.self_attn.k_proj.bias"]
        del checkpoint.tensors[f"model.layers.{i}.self_attn.o_proj.bias"]
    if unlike:
        quantize(checkpoint, attention(0, "q")[0], 8, 64)
        expected = dense_twin(checkpoint)
    assert relative_error(logits_of(checkpoint), logits_of(expected)) <= 1e-5


def test_tied_weights_are_held_once() -> None:
    tied = load(make(tie_word_embeddings=True))
    assert tied.head is tied.embedding
    stored_twice = make(tie_word_embeddings=True)
    stored_twice.tensors["lm_head.weight"] = stored_twice.tensors["model.embed_tokens.weight"].clone()
    twice = load(stored_twice)
    assert twice.head is twice.embedding
    untied = load(make())
    assert untied.head is not untied.embedding


def test_a_tied_model_may_have_a_quantized_output_matrix() -> None:
    checkpoint = make(tie_word_embeddings=True)
    checkpoint.tensors["lm_head.weight"] = torch.zeros(101, 64)
    quantize(checkpoint, "lm_head", 8, 64)
    assert relative_error(logits_of(checkpoint), logits_of(dense_twin(checkpoint))) <= 1e-5
    assert logits_of(checkpoint).ne(logits_of(make(tie_word_embeddings=True))).any()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_a_decoder_inside_a_larger_model_is_found(prefix: str) -> None:
    plain = make("gemma3_text", head_dim=16, query_pre_attn_scalar=16)
    config = {"model_type": "gemma3", "text_config": plain.config}
    moved = {prefix + name.removeprefix("model."): tensor for name, tensor in plain.tensors.items()}
    moved["vision_tower.encoder.weight"] = torch.zeros(3)
    assert torch.equal(logits_of(FakeCheckpoint(config, moved)), logits_of(plain))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.2.self_attn.k_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.2.self_attn.q_norm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_faults_are_found_by_name_before_anything_is_read(name: str, fault: str) -> None:
    checkpoint = make("qwen3", attention_bias=True, head_dim=16)
    tensor = checkpoint.tensors.pop(name)
    if fault == "shape":
        checkpoint.tensors[name] = tensor[:-1]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(checkpoint)
    assert checkpoint.read == []


def test_leftovers_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = make()
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    with caplog.at_level(logging.DEBUG, "quantd.engine.weights"):
        load(checkpoint)
        assert not caplog.records
        checkpoint.tensors["model.layers.7.strange.weight"] = torch.zeros(8)
        load(checkpoint)
    assert [record.getMessage() for record in caplog.records] == [
        "in-memory: 1 tensors not used: model.layers.7.strange.weight"
    ]


def test_progress_grows_to_the_whole() -> None:
    checkpoint = make()
    calls: list[tuple[int, int]] = []
    spec = decoder_spec(checkpoint.config)
    load_weights(spec, checkpoint, OPS, lambda done, total: calls.append((done, total)))
    assert {total for _, total in calls} == {checkpoint.weight_bytes}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1][0] == checkpoint.weight_bytes
    assert len(checkpoint.read) == len(calls) == 2 + 3 * 7


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("model.embed_tokens.weight", "the embedding"),
        ("model.layers.0.input_layernorm.weight", "layer 0"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1"),
        ("model.layers.2.post_attention_layernorm.weight", "layer 2"),
        ("model.norm.weight", "the final norm"),
        ("lm_head.weight", "the output matrix"),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_first_layer_that_is_not_finite_is_named(tensor: str, part: str, value: float) -> None:
    checkpoint = make()
    checkpoint.tensors[tensor][..., 3] = value
    decoder = decoder_of(checkpoint)
    pool = Pool(decoder.spec)
    with pytest.raises(NumericsError, match=part):
        decoder.check_finite(torch.tensor(PROMPT, dtype=torch.int32), pool.inputs([(0, 0, 21)]), pool.kv)


def test_a_sound_model_passes_the_check() -> None:
    decoder = decoder_of(make())
    pool = Pool(decoder.spec)
    decoder.check_finite(torch.tensor(PROMPT, dtype=torch.int32), pool.inputs([(0, 0, 21)]), pool.kv)
