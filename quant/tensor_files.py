"""The tensors of a safetensors folder: checked by the index, read lazily through mmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantd.quant.errors import CheckpointError
from quantd.quant.safetensors_file import TensorInfo

FLOATS = ("F16", "BF16", "F32")
INTEGERS = ("I32", "I64")


class TensorFiles:
    """Named tensors in one or more files. A tensor that is read views the mapped file until it is changed."""

    def __init__(self, index: Mapping[str, TensorInfo]) -> None:
        self.index = index
        self._open: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return name in self.index

    def dtype(self, name: str) -> str | None:
        """The format's spelling ("I8"), None where there is no such tensor."""
        return self.index[name].dtype if name in self.index else None

    def check(self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless `name` is there with one of the dtypes and one of the shapes."""
        info = self.index.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name} is missing: expected {_any_shape(shapes)}")
        if info.dtype not in dtypes:
            raise CheckpointError(f"tensor {name}: expected dtype {' or '.join(dtypes)}, found {info.dtype}")
        if info.shape not in shapes:
            raise CheckpointError(
                f"tensor {name}: expected shape {_any_shape(shapes)}, found {list(info.shape)}"
            )

    def read(self, name: str) -> Tensor:
        """The tensor as stored. Raises CheckpointError where the file no longer is what its index said."""
        path = self.index[name].file
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor

    def read_groups(self, name: str, groups: int) -> Tensor:
        """The group of each input. Raises CheckpointError where one is not in 0 to groups - 1."""
        g_idx = self.read(name)
        low, high = (int(bound) for bound in torch.aminmax(g_idx))
        if low < 0 or high >= groups:
            raise CheckpointError(f"tensor {name}: expected groups 0 to {groups - 1}, found {low} to {high}")
        return g_idx


def _any_shape(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)
