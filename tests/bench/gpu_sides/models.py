"""Llamas of random weights at 4 bit, made where they are used, and runners around them."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_sides.setup import Setup, Skipped
from gpu_sides.sizes import ModelShape
from quantd.engine.config import EngineConfig
from quantd.engine.gpu_runner import GpuRunner
from quantd.engine.layers.rope import RopeSpec, Unscaled, rope_table
from quantd.engine.messages import ModelInfo
from quantd.engine.model_part import LoadedPart
from quantd.engine.models.decoder import Decoder
from quantd.engine.models.spec import DecoderSpec, LayerSpec
from quantd.engine.parallel import Place
from quantd.engine.shard import Part
from quantd.engine.weights import DecoderWeights, LayerWeights
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.gpu.weights import GpuWeight
from quantd.kernels.ops import RopeTable
from quantd.kernels.weights import DenseWeight, QuantizedWeight

# Codes are uniform in -8..7: times this they have the standard deviation 0.02 of a fresh model.
_SCALE = 0.0043
_WORKSPACE = 6 << 30  # for activations, logits and recorded steps


def random_decoder(setup: Setup, shape: ModelShape, max_model_len: int) -> Decoder:
    """Matrices at 4 bit, symmetric in groups; a plain embedding, which is the output matrix too.

    Raises Skipped where there is no room.
    """
    setup.need(shape.num_bytes)
    ops = GpuOps(setup.device, setup.dtype, same_bits=True)
    embedding = ops.pack(DenseWeight(_normal(setup, shape.vocab_size, shape.hidden)))
    spec = _spec(shape, max_model_len)
    table = rope_table(spec.ropes[0], max_model_len)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(setup, ops, shape) for _ in range(shape.num_layers)),
        final_norm=torch.ones(shape.hidden, device=setup.device),
        head=embedding,
        ropes=(RopeTable(table.cos.to(setup.device), table.sin.to(setup.device)),),
    )
    return Decoder(spec, weights, ops)


def with_bits(decoder: Decoder, same_bits: bool) -> Decoder:
    """The same weights under the other promise."""
    return Decoder(decoder.spec, decoder.weights, GpuOps(decoder.ops.device, decoder.ops.dtype, same_bits))


def first_layers(decoder: Decoder, number: int) -> Decoder:
    """A model of the first layers of another."""
    spec = replace(decoder.spec, layers=decoder.spec.layers[:number])
    return Decoder(spec, replace(decoder.weights, layers=decoder.weights.layers[:number]), decoder.ops)


def runner_of(setup: Setup, decoder: Decoder, config: EngineConfig, num_blocks: int) -> GpuRunner:
    """A runner as an engine builds it, with a pool of so many blocks, or as many as there is room for.

    Raises Skipped where that is none.
    """
    place = Place(Part(range(len(decoder.spec.layers))))
    loaded = LoadedPart(config, decoder, place, setup.device)
    block_bytes = loaded.memory.block_bytes
    num_blocks = min(num_blocks, (setup.free_bytes - _WORKSPACE) // block_bytes)
    if num_blocks < 1:
        raise Skipped(f"no room for a KV cache: {setup.free_bytes / 1e9:.0f} GB are free")
    part = loaded.allocate(num_blocks)
    info = ModelInfo(
        architecture="llama",
        backend=decoder.ops.name,
        vocab_size=decoder.spec.vocab_size,
        hidden_size=decoder.spec.hidden_size,
        max_model_len=decoder.spec.max_model_len,
        weight_bytes=decoder.weights.nbytes,
        kv_dtype=config.kv_dtype,
        kv_bytes=num_blocks * block_bytes,
        kv_bytes_per_token=block_bytes // config.block_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        load_seconds=0,
    )
    return GpuRunner(part, info)


def _spec(shape: ModelShape, max_model_len: int) -> DecoderSpec:
    return DecoderSpec(
        model_type="llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        heads=shape.heads,
        layers=(LayerSpec(),) * shape.num_layers,
        ropes=(RopeSpec(500000.0, shape.heads.head_dim, Unscaled(max_model_len)),),
        max_model_len=max_model_len,
        norm_eps=1e-5,
        attention_scale=shape.heads.head_dim**-0.5,
        tied=True,
    )


def _layer(setup: Setup, ops: GpuOps, shape: ModelShape) -> LayerWeights:
    matrices = {name: (_matrix(setup, ops, shape, *size),) for name, size in shape.matrices.items()}
    return LayerWeights(
        attention_norm=torch.ones(shape.hidden, device=setup.device),
        qkv=matrices["qkv"],
        qk_norm=None,
        o=matrices["o"],
        after_attention_norm=None,
        mlp_norm=torch.ones(shape.hidden, device=setup.device),
        gate_up=matrices["gate_up"],
        down=matrices["down"],
        after_mlp_norm=None,
    )


def _matrix(setup: Setup, ops: GpuOps, shape: ModelShape, n: int, k: int) -> GpuWeight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=setup.device)
    scale = torch.full((n, k // shape.group_size), _SCALE, device=setup.device)
    return ops.pack(QuantizedWeight(codes, scale, -8 * scale, 4, shape.group_size))


def _normal(setup: Setup, *size: int) -> torch.Tensor:
    return 0.02 * torch.randn(size, device=setup.device, dtype=setup.dtype)
