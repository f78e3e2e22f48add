"""What can be told of a model on disk without loading it: read from the small files beside its weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quantd.daemon.capabilities import Capabilities, read_capabilities
from quantd.daemon.model_files import read_json
from quantd.daemon.models import Models, StoredModel
from quantd.daemon.preset import Preset
from quantd.daemon.store import MANIFEST
from quantd.daemon.template_files import template_source
from quantd.daemon.tokenizer import end_names
from quantd.quant.safetensors_file import read_index


class Tensor(NamedTuple):
    """A tensor of a weight file; type: in the file's own spelling."""

    name: str
    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelCard:
    """stored: the model's entry in the store. digest: hexadecimal, another for every model and version of it.

    num_parameters: of its matrices and norms. config: config.json, of the text part. ends: names of tokens
    that end an answer. embeds: whether it was made for embeddings and nothing else.
    """

    stored: StoredModel
    digest: str
    num_parameters: int
    config: Mapping[str, Any]
    capabilities: Capabilities
    template: str | None
    ends: tuple[str, ...]
    embeds: bool
    preset: Preset

    @classmethod
    def read(cls, stored: StoredModel) -> ModelCard:
        """Read the folder of a model. Raises CheckpointError for a damaged file."""
        folder = stored.path
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        config = read_json(folder / "config.json")
        config = config.get("text_config") or config
        template = template_source(folder, tokenizer_config)
        return cls(
            stored,
            _digest(folder),
            _num_parameters(config),
            config,
            read_capabilities(folder),
            template,
            tuple(end_names(tokenizer_config, template)),
            (folder / "modules.json").is_file(),
            Preset.read(folder),
        )

    def tensors(self) -> list[Tensor]:
        """What the weight files hold. Raises CheckpointError."""
        from quantd.quant.gguf_index import INDEX_NAME, read_gguf_index  # takes numpy along

        folder = self.stored.path
        if (folder / INDEX_NAME).is_file():
            return [Tensor(item.name, item.type, item.shape) for item in read_gguf_index(folder).tensors]
        return [Tensor(name, info.dtype, info.shape) for name, info in read_index(folder).items()]

    def number(self, key: str) -> int | None:
        """A whole number of config.json, None where it has none."""
        value = self.config.get(key)
        return value if type(value) is int else None


class Cards:
    """The cards of a daemon's models. Each is read once, and again where its folder has changed."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[str, tuple[int, ModelCard]] = {}

    async def get(self, name: str | None) -> ModelCard:
        """The card of the model that requests with this name go to.

        Raises ModelNotFoundError, CheckpointError.
        """
        return await self._read(self._models.find(name))

    async def all(self) -> list[ModelCard]:
        """The cards of all models, by name."""
        return [await self._read(stored) for stored in self._models.store.list()]

    async def _read(self, stored: StoredModel) -> ModelCard:
        stamp = stored.path.stat().st_mtime_ns
        known = self._known.get(stored.name)
        if known is None or known[0] != stamp:
            known = self._known[stored.name] = stamp, await asyncio.to_thread(ModelCard.read, stored)
        return known[1]

    def context_len(self, card: ModelCard) -> int | None:
        """Tokens of one request that the model serves, or would serve if it were loaded."""
        served = self._models.context_len(card.stored) or card.number("max_position_embeddings")
        lengths = [length for length in (served, card.preset.context_len) if length is not None]
        return min(lengths, default=None)


def _digest(folder: Path) -> str:
    file = folder / MANIFEST
    return hashlib.sha256(file.read_bytes() if file.is_file() else str(folder).encode()).hexdigest()


def _num_parameters(config: Mapping[str, Any]) -> int:
    """Of a Llama-like decoder of these sizes, without biases; 0 where a size is not told."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    hidden, inner, layers, heads, vocab = (config.get(name) or 0 for name in names)
    if not all((hidden, inner, layers, heads, vocab)):
        return 0
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
