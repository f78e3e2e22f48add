"""An imported GGUF file as a checkpoint: Hugging Face names, shapes and values over ggml's blocks.

The converter's changes are undone on the way: the row order of q and k, the offset of norm weights.
Tensors are mapped, not read, until they are asked for.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight
from quantd.quant import stand_in
from quantd.quant.errors import CheckpointError
from quantd.quant.gguf_blocks import BLOCK_FORMATS
from quantd.quant.gguf_families import FAMILIES, TOP_LEVEL, Family
from quantd.quant.gguf_index import GgufIndex, GgufTensor, read_gguf_index
from quantd.quant.safetensors_file import read_json

DENSE_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_gguf(folder: Path) -> GgufCheckpoint:
    """The model folder that `import_gguf` made; CheckpointError where the files do not fit each other."""
    index = read_gguf_index(folder)
    if index.architecture not in FAMILIES:
        raise CheckpointError(
            f"{folder}: unknown architecture {index.architecture!r}; import the model again"
        )
    return GgufCheckpoint(folder, read_json(folder / "config.json"), index)


class GgufCheckpoint:
    """The sibling of the safetensors checkpoint (see `quant.checkpoint.Checkpoint`)."""

    def __init__(self, path: Path, config: dict[str, Any], index: GgufIndex) -> None:
        self.path = path
        self.config = config
        self._index = index
        self._family = FAMILIES[index.architecture]
        self._tensors = {_hf_name(tensor.name, self._family): tensor for tensor in index.tensors}
        # Copy-on-write: torch wants writable memory, the file stays as it is.
        self._data: NDArray[np.uint8] = np.memmap(path / index.file, np.uint8, mode="c")

    @property
    def description(self) -> str:
        """For people: "gguf Q4_1"."""
        return self._index.description

    @property
    def weight_bytes(self) -> int:
        """Bytes on disk of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def names(self) -> list[str]:
        """All tensor names, in file order."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether the tensor `name` exists."""
        return name in self._tensors

    def has_module(self, module: str) -> bool:
        """Whether a weight of `module` exists."""
        return f"{module}.weight" in self._tensors

    def check_linear(self, module: str, shape: tuple[int, int]) -> None:
        """Raise CheckpointError unless `module` has a weight of `shape` (N, K)."""
        self._find(f"{module}.weight", shape)

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless tensor `name` exists with `shape`."""
        self._find(name, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """The weight of `module`, (N, K): dense as stored, or its codes with a scale and offset per group."""
        name = f"{module}.weight"
        return self._decode(name, self._find(name, shape))

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        """A weight of made-up values; see Checkpoint."""
        kind = self._tensors[f"{module}.weight"].type
        if kind in DENSE_DTYPES:
            return stand_in.dense(shape, DENSE_DTYPES[kind])
        return stand_in.blocks(shape, BLOCK_FORMATS[kind])

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name` as float32 of `shape`."""
        values = self._decode(name, self._find(name, shape)).dequantize().reshape(shape)
        return values - self._family.norm_offset if name.endswith("norm.weight") else values

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path / self._index.file}: tensor {name!r} is missing")
        if tensor.shape != tuple(shape):
            raise CheckpointError(
                f"{self.path / self._index.file}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"expected {list(shape)}"
            )
        heads = self._permuted_heads(name)
        if heads and shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self.path / self._index.file}: {name!r}: {shape[0]} rows do not make {heads} heads"
            )
        return tensor

    def _permuted_heads(self, name: str) -> int:
        """Heads of a q or k projection whose rows the converter reordered, else 0."""
        match = re.search(r"self_attn\.([qk])_proj\.", name) if self._family.permuted else None
        if match is None:
            return 0
        return int(self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])

    def _decode(self, name: str, tensor: GgufTensor) -> Weight:
        raw = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        heads = self._permuted_heads(name)
        num_rows = tensor.shape[0] if heads else math.prod(tensor.shape[:-1])
        rows = raw.reshape(num_rows, -1)
        if heads:
            rows = rows[rotary_row_order(num_rows, heads)]
        if tensor.type in DENSE_DTYPES:
            return DenseWeight(torch.from_numpy(rows).view(DENSE_DTYPES[tensor.type]))
        return decode_blocks(rows, tensor.type)


def decode_blocks(rows: NDArray[np.uint8], kind: str) -> QuantizedWeight:
    """The matrix whose rows are the block bytes `rows` [N, bytes] of ggml type `kind`."""
    layout = BLOCK_FORMATS[kind]
    # An infinite scale in a damaged file becomes NaN here; the first forward pass names its layer.
    with np.errstate(invalid="ignore", over="ignore"):
        parts = layout.decode(rows.reshape(-1, layout.nbytes))
    codes, scale, offset = (torch.from_numpy(part.reshape(len(rows), -1)) for part in parts)
    return QuantizedWeight(codes, scale, offset, layout.bits, layout.group)


def rotary_row_order(num_rows: int, heads: int) -> NDArray[np.int64]:
    """The stored row of each row of HF's q or k: ggml interleaves the two halves of a head."""
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _hf_name(name: str, family: Family) -> str:
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    table = family.layer_table if layer else TOP_LEVEL
    prefix = f"model.layers.{layer[1]}." if layer else ""
    inner = layer[2] if layer else module
    found = next((hf for hf, gguf in table.items() if gguf == inner), None)
    return f"{prefix}{found}.{kind}" if found else name
