"""What the model tests share: tiny random transformers models, a checkpoint in memory, steps over a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from quantd.engine.models.decoder import Decoder
from quantd.engine.models.spec import DecoderSpec
from quantd.kernels.ops import AttentionInputs, KVLayer
from quantd.kernels.weights import DenseWeight, Weight
from quantd.quant.errors import CheckpointError

BLOCK_SIZE = 16


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose every norm, bias and matrix is far enough from its default for a wrong detail to show."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                mean = 1.0 if name.endswith("norm.weight") and "gemma" not in config.model_type else 0.0
                parameter.copy_(mean + 0.3 * noise)
            else:
                parameter.copy_(0.2 * noise)
    return model


class FakeCheckpoint:
    """A Checkpoint over tensors in memory; `weights` takes the place of a module's `.weight`."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], weights: dict[str, Weight] | None = None
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.weights = weights or {}
        self.path = Path("in-memory")
        self.description = "fake"
        self.read: list[str] = []

    @classmethod
    def of(cls, model: PreTrainedModel) -> FakeCheckpoint:
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        return cls(model.config.to_dict(), tensors)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def names(self) -> list[str]:
        return [*self.tensors, *(f"{module}.qweight" for module in self.weights)]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def has_module(self, module: str) -> bool:
        return module in self.weights or f"{module}.weight" in self.tensors

    def check_linear(self, module: str, shape: tuple[int, int]) -> None:
        if module not in self.weights:
            self.check_tensor(f"{module}.weight", shape)

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.tensors:
            raise CheckpointError(f"{name} is missing")
        if tuple(self.tensors[name].shape) != shape:
            raise CheckpointError(f"{name} has shape {tuple(self.tensors[name].shape)}, expected {shape}")

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        self.read.append(module)
        return self.weights.get(module) or DenseWeight(self.tensor(f"{module}.weight", shape))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.check_tensor(name, shape)
        return self.tensors[name].float()


@dataclass
class Pool:
    """Float32 keys and values, every request's blocks scattered, unwritten slots NaN."""

    spec: DecoderSpec
    num_blocks: int = 64
    kv: list[KVLayer] = field(init=False)
    _free: list[int] = field(init=False)
    _tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.num_blocks, self.spec.heads.num_kv_heads, BLOCK_SIZE, self.spec.heads.head_dim)
        self.kv = [
            KVLayer(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in self.spec.layers
        ]
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1))
        self._free = order.tolist()

    def inputs(self, chunks: Iterable[tuple[int, int, int]]) -> AttentionInputs:
        """For chunks (request, start, stop)."""
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths, tables = [0], [], []
        for request, start, stop in chunks:
            table = self._tables.setdefault(request, [])
            while len(table) * BLOCK_SIZE < stop:
                table.append(self._free.pop())
            positions += range(start, stop)
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]
            starts.append(len(positions))
            lengths.append(stop)
            tables.append(table)
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        return AttentionInputs(
            *(torch.tensor(v, dtype=torch.int32) for v in (positions, slots, starts, lengths, padded))
        )


def run_steps(
    decoder: Decoder, prompts: Sequence[list[int]], steps: Sequence[Sequence[tuple[int, int, int]]]
) -> list[Tensor]:
    """Every prompt's logits [len, V], computed in steps of chunks (request, start, stop)."""
    pool = Pool(decoder.spec)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for chunks in steps:
        ids = [token for request, start, stop in chunks for token in prompts[request][start:stop]]
        hidden = decoder.forward(torch.tensor(ids, dtype=torch.int32), pool.inputs(chunks), pool.kv)
        logits = decoder.logits(hidden)
        for (request, _, _), rows in zip(
            chunks, logits.split([stop - start for _, start, stop in chunks]), strict=True
        ):
            parts[request].append(rows)
    return [torch.cat(rows) for rows in parts]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """max |ours - theirs| / max |theirs|."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
