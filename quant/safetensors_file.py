"""The index of safetensors files: names, types, shapes and places, checked before anything is read.

A header is hostile input: whatever the bytes are, reading them ends in an index or in a CheckpointError.
Torch-free. Format: an unsigned 64-bit little-endian length N, N bytes of JSON {name: {dtype, shape,
data_offsets}}, then the data, which the tensors cover without gap or overlap
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quantd.quant.errors import CheckpointError, UnsupportedModelError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_JSON_BYTES = 100_000_000  # an index of all tensors is the largest of them

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes of `file`, of dtype (the format's spelling: "F16") and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


TensorIndex = dict[str, TensorInfo]

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Size, _Size]


def read_header(path: Path) -> TensorIndex:
    """The tensors of one file, in data order. Raises CheckpointError on anything but a sound, whole file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header = _header_bytes(path, file.read(8), size)
            raw = file.read(header)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    entries = _parse_entries(path, raw)
    _check_cover(path, entries, size - 8 - header)
    return {name: _info(path, name, entry) for name, entry in entries.items()}


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file; download it again")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: a header of {length} bytes (limit {MAX_HEADER_BYTES}): not safetensors"
        )
    if length > size - 8:
        raise CheckpointError(
            f"{path}: truncated: the header has {length} bytes, the file {size}; download it again"
        )
    return length


def _parse_entries(path: Path, raw: bytes) -> dict[str, _Entry]:
    """Entries sorted by offset. Of a name that is there twice other readers may take either, so none is."""
    try:
        parts = json.loads(raw, object_pairs_hook=_without_doubles)
        if isinstance(parts, dict):
            parts.pop("__metadata__", None)
        entries = msgspec.convert(parts, dict[str, _Entry])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error}") from error
    return dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:100]!r} is there twice")
        found[name] = value
    return found


def _check_cover(path: Path, entries: dict[str, _Entry], data_bytes: int) -> None:
    """The tensors follow one another without gap or overlap and end where the file ends."""
    end = 0
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if start != end or stop < start:
            raise CheckpointError(
                f"{path}: tensor {name} lies at bytes {start} to {stop}, expected it to begin at {end}: "
                "the header is damaged"
            )
        end = stop
    if end > data_bytes:
        raise CheckpointError(
            f"{path}: truncated: the header names {end} bytes of tensors, the file holds {data_bytes}; "
            "download it again"
        )
    if end < data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - end} bytes follow the last tensor: the file is damaged")


def _info(path: Path, name: str, entry: _Entry) -> TensorInfo:
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise CheckpointError(f"{path}: tensor {name} has unknown dtype {entry.dtype[:40]!r}")
    start, stop = entry.data_offsets
    expected = math.prod(entry.shape) * bits
    if expected != (stop - start) * 8:
        raise CheckpointError(
            f"{path}: tensor {name}: shape {list(entry.shape)} of {entry.dtype} takes {expected // 8} bytes, "
            f"the header gives it {stop - start}"
        )
    return TensorInfo(path, entry.dtype, entry.shape, stop - start)


def read_index(folder: Path) -> TensorIndex:
    """The tensors of a model folder: those its `*.safetensors.index.json` names, else its one file's.

    Files that the index does not name are ignored. Raises CheckpointError for a missing or damaged
    file or tensor and UnsupportedModelError for a folder of pickled weights.
    """
    index = _choose(folder, "model.safetensors.index.json", "*.safetensors.index.json")
    if index is not None:
        return _read_shards(folder, index)
    file = _choose(folder, "model.safetensors", "gptq_model*.safetensors") or _choose(
        folder, "model.safetensors", "*.safetensors"
    )
    if file is None:
        raise _no_weights(folder)
    return read_header(file)


def _choose(folder: Path, preferred: str, pattern: str) -> Path | None:
    """`preferred` if it is there, else the only match of `pattern`."""
    if (folder / preferred).is_file():
        return folder / preferred
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:4])
        raise CheckpointError(
            f"{folder}: {len(found)} weight files and no index ({names}, ...): add the missing "
            "model.safetensors.index.json or leave only the model's own file"
        )
    return found[0] if found else None


def _no_weights(folder: Path) -> CheckpointError | UnsupportedModelError:
    pickles = sorted(path.name for glob in ("*.bin", "*.pt", "*.pth") for path in folder.glob(glob))
    if pickles:
        return UnsupportedModelError(
            f"{folder}: {pickles[0]} is a pickle, which can run code when it is read; convert the model to "
            "safetensors (transformers: save_pretrained)"
        )
    return CheckpointError(f"{folder}: no *.safetensors and no *.gguf file here")


def _read_shards(folder: Path, index: Path) -> TensorIndex:
    weight_map = _weight_map(index)
    headers: dict[str, TensorIndex] = {}
    for file in dict.fromkeys(weight_map.values()):
        if not _is_there(folder / file):
            raise CheckpointError(f"{folder}: {file} is missing, which {index.name} names; download it again")
        headers[file] = read_header(folder / file)
    tensors: TensorIndex = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(
                f"{folder / file}: tensor {name} is missing, which {index.name} expects here"
            )
        tensors[name] = headers[file][name]
    return tensors


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False


def _weight_map(index: Path) -> dict[str, str]:
    raw = read_json(index).get("weight_map")
    try:
        weight_map = msgspec.convert(raw, dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{index}: weight_map: {error}") from error
    for file in weight_map.values():
        # A name with a folder in it could reach outside the model.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {file!r} is not the plain name of a safetensors file")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is missing, unreadable or no object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes, which no such file needs")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
