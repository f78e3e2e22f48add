"""Decoders dealt out to ranks against the same on one rank: every kind of matrix, several architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from model_oracle import FakeCheckpoint, relative_error
from rank_threads import CPU, RankThreads, rank_threads
from test_weights import attention, make, quantize
from torch import Tensor

from quantd.engine.batch import Batch, build_batch
from quantd.engine.config import EngineConfig
from quantd.engine.errors import NumericsError, RequestError
from quantd.engine.model_part import LoadedPart, ModelPart, micro_batches
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.parallel import Place
from quantd.engine.plan import Plan, PlanEntry, RequestState
from quantd.engine.request import Request, SamplingParams
from quantd.engine.shard import Part
from quantd.engine.split import World
from quantd.engine.step_frame import batch_of, step_of
from quantd.engine.weights import load_weights
from quantd.kernels.reference import ReferenceOps

OPS = ReferenceOps("fp32")
ROUNDING = ReferenceOps()
BLOCK_SIZE = 16
NUM_LAYERS = 3
WORLDS = {
    "tp 2": World(2, ((0, 3),)),
    "tp 4": World(4, ((0, 3),)),
    "two stages": World(1, ((0, 2), (2, 3))),
    "three stages of two": World(2, ((0, 1), (1, 2), (2, 3))),
}


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankThreads]:
    with rank_threads(WORLDS[request.param], width=64) as threads:
        yield threads


def modules(layer: int, *names: str) -> list[str]:
    return [f"model.layers.{layer}.mlp.{name}_proj" for name in names]


def every_module() -> list[str]:
    return [
        module
        for layer in range(NUM_LAYERS)
        for module in (*attention(layer, "q", "k", "v", "o"), *modules(layer, "gate", "up", "down"))
    ]


def order(checkpoint: FakeCheckpoint, module: str, seed: int) -> Tensor:
    num_inputs = checkpoint.tensors[f"{module}.weight"].shape[1]
    return torch.randperm(num_inputs, generator=torch.Generator().manual_seed(seed))


def gptq(group_size: int, act_order: bool = False, bits: int = 4) -> FakeCheckpoint:
    """Queries, keys and values have one order, as one calibration gives them; so have gate and up."""
    checkpoint = make(attention_bias=True, mlp_bias=True)
    for module in every_module():
        seed = {"k": "q", "v": "q", "up": "gate"}.get(name := module.split(".")[-1].split("_")[0], name)
        perm = order(checkpoint, module, hash_of(seed)) if act_order else None
        quantize(checkpoint, module, bits, group_size, perm)
    return checkpoint


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def mixed() -> FakeCheckpoint:
    """Case c21, and a quantized output matrix beside tied weights."""
    checkpoint = make(tie_word_embeddings=True)
    quantize(checkpoint, attention(0, "q")[0], 8, 64)
    for module in (*attention(0, "k", "v"), *modules(1, "down"), *attention(2, "o")):
        quantize(checkpoint, module, 4, 32)
    quantize(checkpoint, modules(0, "gate")[0], 3, 16)
    checkpoint.tensors["lm_head.weight"] = torch.zeros(101, 64)
    quantize(checkpoint, "lm_head", 8, 64)
    return checkpoint


def w8a8() -> FakeCheckpoint:
    checkpoint = make()
    for module in every_module():
        quantize(checkpoint, module, 8, checkpoint.tensors[f"{module}.weight"].shape[1])
        checkpoint.weights[module] = replace(checkpoint.weights[module], input_bits=8)  # type: ignore[type-var]
    return checkpoint


CHECKPOINTS: dict[str, Callable[[], FakeCheckpoint]] = {
    # 93 is odd, and 4 query heads on 2 key/value heads are repeated on 4 ranks.
    "plain": lambda: make(intermediate_size=93, head_dim=20),
    "biases (case c39)": lambda: make(attention_bias=True, mlp_bias=True),
    "qwen2": lambda: make("qwen2", tie_word_embeddings=True),
    "qwen3": lambda: make("qwen3", head_dim=24, num_attention_heads=6, num_key_value_heads=3),
    "one key/value head": lambda: make("qwen3", head_dim=16, num_attention_heads=5, num_key_value_heads=1),
    "phi3, joined in the file": lambda: make("phi3"),
    "gemma2": lambda: make("gemma2", head_dim=20, query_pre_attn_scalar=30, attn_logit_softcapping=3.0),
    "gemma3": lambda: make("gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=17),
    "granite": lambda: make("granite", residual_multiplier=0.2, embedding_multiplier=12.0),
    # 6 groups of 16 on 4 ranks; then groups across the borders of heads, and 3 groups on 4 ranks.
    "gptq": lambda: gptq(16),
    "gptq g32": lambda: gptq(32, bits=8),
    "gptq act-order": lambda: gptq(16, act_order=True),
    "gptq g32 act-order": lambda: gptq(32, act_order=True, bits=3),
    "mixed": mixed,
    "W8A8": w8a8,
}


@cache
def checkpoint_of(name: str) -> FakeCheckpoint:
    return CHECKPOINTS[name]()


def part_of(checkpoint: FakeCheckpoint, place: Place, ops: ReferenceOps = OPS) -> ModelPart:
    spec = decoder_spec(checkpoint.config)
    weights = load_weights(spec, checkpoint, ops, lambda done, total: None, place.part)
    decoder = Decoder(spec, weights, ops, place.part, place.group)
    config = EngineConfig(model_path="", kv_dtype="fp32", block_size=BLOCK_SIZE)
    return LoadedPart(config, decoder, place, CPU).allocate(16)


def steps() -> list[Plan]:
    """Three requests: chunks of prompts, a chunk beside single tokens, single tokens; blocks out of order."""
    blocks = {"a": (9, 2, 11, 4), "b": (7, 1, 12), "c": (3,)}
    states = {
        name: RequestState(
            Request(
                id=name, prompt=[(7 * i + len(name)) % 97 + 3 for i in range(64)], sampling=SamplingParams()
            )
        )
        for name in blocks
    }
    chunks = [
        [("a", 0, 50), ("b", 0, 37), ("c", 0, 5)],
        [("b", 37, 1), ("a", 50, 13), ("c", 5, 1)],
        [("c", 6, 1), ("a", 63, 1), ("b", 38, 1)],
    ]
    return [
        Plan(
            tuple(
                PlanEntry(
                    states[name], start, number, True, blocks[name][: -(-(start + number) // BLOCK_SIZE)]
                )
                for name, start, number in step
            )
        )
        for step in chunks
    ]


def outputs(part: ModelPart) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and, whole on rank 0, logits of every token of `steps`; none behind the first stage."""
    found = []
    for plan in steps():
        # As it comes to other ranks.
        batch = batch_of(step_of(build_batch(plan, BLOCK_SIZE)))
        if part.decoder.part.has_ends:
            hidden = part.forward(batch)
            found.append((hidden, part.decoder.logits(hidden)))
        else:
            part.follow(batch)
    return found


def logits_of(part: ModelPart) -> Tensor:
    return torch.cat([logits for _, logits in outputs(part)])


@cache
def logits_of_one_rank(name: str, ops: ReferenceOps = OPS) -> Tensor:
    return logits_of(part_of(checkpoint_of(name), Place(Part(range(NUM_LAYERS))), ops))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ranks_give_the_logits_of_one(ranks: RankThreads, name: str) -> None:
    """And among themselves the same bits, from which any of them would draw the same tokens."""
    expected = logits_of_one_rank(name)
    found = ranks.run(lambda rank, place: outputs(part_of(checkpoint_of(name), place)))
    logits = torch.cat([logits for _, logits in found[0]])
    assert logits.shape == expected.shape == (110, 101)
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    if ranks.world.tp == 1:
        assert torch.equal(logits, expected)
    else:
        assert relative_error(logits, expected) <= 1e-5
    for others in found[1 : ranks.world.tp]:
        for (hidden, _), (ours, _) in zip(others, found[0], strict=True):
            assert torch.equal(hidden, ours)


def test_ranks_that_round_inputs_are_as_exact_as_one(ranks: RankThreads) -> None:
    """W8A8 as it is served: with tp not one rank's numbers, but no further from those without rounding."""
    exact, one = logits_of_one_rank("W8A8"), logits_of_one_rank("W8A8", ROUNDING)
    found = ranks.run(lambda rank, place: outputs(part_of(checkpoint_of("W8A8"), place, ROUNDING)))
    logits = torch.cat([logits for _, logits in found[0]])
    assert torch.equal(logits, one) == (ranks.world.tp == 1)
    assert (logits - exact).square().mean() <= 1.05 * (one - exact).square().mean()
    assert relative_error(logits, one) <= relative_error(one, exact) <= 0.02


def test_ranks_hold_the_weights_between_them(ranks: RankThreads) -> None:
    whole = part_of(checkpoint_of("gptq"), Place(Part(range(NUM_LAYERS)))).decoder.weights.nbytes
    parts = ranks.run(lambda rank, place: part_of(checkpoint_of("gptq"), place).decoder.weights.nbytes)
    # Keys and values are repeated on four ranks.
    assert whole <= sum(parts) <= whole * (1.1 if ranks.world.tp == 4 else 1.0) + 4096
    assert max(parts) < whole


def test_a_step_as_micro_batches_is_the_same_step() -> None:
    part = part_of(checkpoint_of("gptq"), Place(Part(range(NUM_LAYERS))))
    cut = part_of(checkpoint_of("gptq"), Place(Part(range(NUM_LAYERS))))
    for plan in steps():
        batch = build_batch(plan, BLOCK_SIZE)
        for number in range(1, min(7, plan.num_tokens) + 1):
            parts = list(micro_batches(batch.token_ids, batch.attention, number))
            assert len(parts) == number
            hidden = torch.cat([cut.forward(as_batch(ids, inputs)) for ids, inputs in parts])
            assert relative_error(hidden, part.forward(batch)) <= 1e-6


def as_batch(token_ids: Tensor, inputs: object) -> Batch:
    none = torch.empty(0, dtype=torch.int32)
    return Batch(token_ids, inputs, none, none)  # type: ignore[arg-type]


def test_every_rank_of_a_stage_finds_nan() -> None:
    """In what only one of them holds."""
    checkpoint = make()
    checkpoint.tensors["model.layers.2.mlp.gate_proj.weight"][95] = torch.nan

    def load(rank: int, place: Place) -> None:
        with pytest.raises(NumericsError, match="layer 2 gives NaN"):
            part_of(checkpoint, place)

    with rank_threads(WORLDS["tp 2"], width=64) as threads:
        threads.run(load)


def test_more_ranks_than_heads_are_refused() -> None:
    checkpoint = make()
    with pytest.raises(RequestError, match="tp 5"):
        load_weights(
            decoder_spec(checkpoint.config),
            checkpoint,
            OPS,
            lambda done, total: None,
            Part(range(NUM_LAYERS), 0, 5),
        )
    assert checkpoint.read == []


def test_a_stage_reads_its_own_layers_only() -> None:
    checkpoint = make()
    calls: list[tuple[int, int]] = []
    load_weights(
        decoder_spec(checkpoint.config), checkpoint, OPS, lambda *call: calls.append(call), Part(range(1, 2))
    )
    assert sorted(checkpoint.read) == sorted(m for m in every_module() if m.startswith("model.layers.1."))
    assert calls[-1] == (checkpoint.weight_bytes,) * 2
