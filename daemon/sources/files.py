"""What a model folder may hold. Pickles and code never come in."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.gguf", "tokenizer.model", "merges.txt", "vocab.txt")
# How sentence-transformers says that a model embeds; of all that models have, alone in a folder of its own.
POOLING_FILE = "1_Pooling/config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def is_pickle(name: str) -> bool:
    """Whether a file of this name holds pickled weights, or whatever else."""
    return any(fnmatch(name, pattern) for pattern in _PICKLES)


def is_model_file(name: str) -> bool:
    """Whether a file of this name, or path in its folder, may be part of a model folder."""
    if "/" in name:
        return name == POOLING_FILE
    return any(fnmatch(name, pattern) for pattern in _MODEL_FILES)


def model_files(folder: Path) -> list[str]:
    """The paths in a folder of what may be part of a model."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    names += [POOLING_FILE] if (folder / POOLING_FILE).is_file() else []
    return [name for name in names if is_model_file(name)]
