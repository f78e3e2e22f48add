"""What a model makes of its hidden states to embed a text, as the files beside its weights say.

Source: sentence-transformers' modules.json and 1_Pooling/config.json, of its versions 2 to 6. A model
without them is one for text: the mean of its hidden states says most of it, and vectors have length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quantd.daemon.model_files import read_json
from quantd.engine.errors import RequestError
from quantd.engine.request import EmbeddingParams, Pooling
from quantd.quant.errors import CheckpointError

_POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "first"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class _Module(msgspec.Struct, frozen=True):
    """type: a Python class, of which only the name is told here."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class EmbeddingHead:
    """modes: of pooling; the vectors of several stand side by side. others: modules that are not here."""

    modes: tuple[str, ...] = ("mean",)
    normalizes: bool = True
    others: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> EmbeddingHead:
        """The head of the model in a folder. Raises CheckpointError for a damaged file."""
        modules = _modules(folder / "modules.json")
        path = next((module.path for module in modules if module.kind == "Pooling"), "1_Pooling")
        modes = _modes(read_json(folder / path / "config.json"))
        if not modules:
            return cls(modes)
        kinds = [module.kind for module in modules]
        known = ("Transformer", "Pooling", "Normalize")
        return cls(modes, "Normalize" in kinds, tuple(kind for kind in kinds if kind not in known))

    def params(self, dimensions: int | None, normalize: bool | None) -> EmbeddingParams:
        """How to embed, with the model's own choice where normalize is None.

        Raises RequestError where the model embeds in a way that quantd does not have.
        """
        for kind in self.others:
            raise RequestError(
                f"this model's embeddings need a module {kind!r}, which is not supported", "model"
            )
        if len(self.modes) != 1 or self.modes[0] not in _POOLINGS:
            raise RequestError(
                f"this model's embeddings are pooled by {' and '.join(self.modes)}, which is not supported "
                f"(have: {', '.join(_POOLINGS)})",
                "model",
            )
        return EmbeddingParams(
            pooling=_POOLINGS[self.modes[0]],
            dimensions=dimensions,
            normalize=self.normalizes if normalize is None else normalize,
        )


def _modules(file: Path) -> list[_Module]:
    if not file.is_file():
        return []
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[_Module])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a list of modules: {error}") from error


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("pooling_mode")
    if named is not None:
        return tuple(map(str, named)) if isinstance(named, list) else (str(named),)
    return tuple(mode for flag, mode in _FLAGS.items() if config.get(flag)) or ("mean",)
