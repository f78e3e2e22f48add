"""tensors.json: where each tensor of an imported GGUF file lies, so that the file's header is parsed once.

Light on purpose: no torch, no `gguf`, no tokenizers.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import msgspec

from quantd.quant.errors import CheckpointError
from quantd.quant.gguf_blocks import BLOCK_FORMATS, DENSE_BYTES

INDEX_NAME = "tensors.json"


class GgufTensor(msgspec.Struct, frozen=True):
    """Where one tensor lies: `shape` row-major ([N, K] for a matrix), `offset` in bytes of the whole file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufIndex(msgspec.Struct, frozen=True):
    """The tensors of `file` (a name in the same folder, `file_bytes` long) by their GGUF names."""

    file: str
    file_bytes: int
    architecture: str
    tensors: list[GgufTensor]

    @property
    def description(self) -> str:
        """For people: "gguf Q4_1", by the type that most bytes of the layers have."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            if tensor.name.startswith("blk."):
                sizes[tensor.type] += tensor.nbytes
        return " ".join(["gguf", *(kind for kind, _ in sizes.most_common(1))])


def row_bytes(kind: str, values: int) -> int:
    """Bytes of a row of `values` values of ggml type `kind`."""
    if kind in DENSE_BYTES:
        return values * DENSE_BYTES[kind]
    return values // BLOCK_FORMATS[kind].block * BLOCK_FORMATS[kind].nbytes


def read_gguf_index(folder: Path) -> GgufIndex:
    """The index in `folder`, checked against the GGUF file there; CheckpointError where they do not fit."""
    path = folder / INDEX_NAME
    try:
        index = msgspec.json.decode(path.read_bytes(), type=GgufIndex)
        file_bytes = (folder / index.file).stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read: {error.strerror}; import it again"
        ) from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: damaged: {error}; import the model again") from error
    if file_bytes != index.file_bytes:
        raise CheckpointError(
            f"{folder / index.file}: {file_bytes} bytes, imported with {index.file_bytes}; import it again"
        )
    for tensor in index.tensors:
        if not _fits(tensor, file_bytes):
            raise CheckpointError(f"{path}: tensor {tensor.name!r} does not fit the file; import it again")
    return index


def _fits(tensor: GgufTensor, file_bytes: int) -> bool:
    if tensor.type not in DENSE_BYTES and tensor.type not in BLOCK_FORMATS:
        return False
    rows, values = math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.shape else 0
    return (
        min(tensor.shape, default=0) > 0
        and tensor.nbytes == rows * row_bytes(tensor.type, values)
        and 0 <= tensor.offset <= file_bytes - tensor.nbytes
    )
