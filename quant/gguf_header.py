"""Reading the header of a GGUF file: metadata and the index of its tensors.

Source: the GGUF specification, versions 2 and 3, little-endian. A header is hostile input, so every
count, length and offset is checked against the bytes there are before it is used. `gguf.GGUFReader`
checks none of them and takes seconds on a large vocabulary; it is the oracle of the tests.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.gguf_index import GgufTensor

Value = bool | int | float | str | list[Any]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
FLOAT32, STRING, ARRAY = 6, 8, 9
# The smallest a metadata entry (key length, type, value) and a tensor entry can be, in bytes.
MIN_ENTRY, MIN_TENSOR = 13, 24

SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself; the getters raise CheckpointError naming the key at fault."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, e.g. "llama"."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """The string under `key`, which must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self._fault(key, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """The non-negative integer under `key`, or `default` where the key is absent and one is given."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._fault(key, "a non-negative integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number under `key`, or `default` where the key is absent and one is given."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._fault(key, "a finite number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The boolean under `key`, or `default`."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._fault(key, "a boolean")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """The array under `key`, empty where absent; every item is a `kind`."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._fault(key, f"an array of {kind.__name__}")
        return value

    def _fault(self, key: str, expected: str) -> CheckpointError:
        state = "holds something else" if key in self.metadata else "is missing"
        return CheckpointError(f"{self.path}: GGUF key {key!r} must be {expected} but {state}")


def read_header(path: Path) -> GgufHeader:
    """Parse the header of the GGUF file at `path`.

    Raises CheckpointError where the file is truncated or contradicts itself, UnsupportedModelError for
    another version, byte order or an unknown tensor type.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < MIN_TENSOR:
                raise CheckpointError(f"{path}: too small to be a GGUF file ({path.stat().st_size} bytes)")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class _Cursor:
    """A position in the bytes of a header; every read is bounded by the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def header(self) -> GgufHeader:
        if self.take(4) != MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
        version = self.u32()
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version} is not supported (only 2 and 3, little-endian)"
            )
        num_tensors = self.count(MIN_TENSOR, "tensors")
        num_entries = self.count(MIN_ENTRY, "metadata entries")
        metadata = self.metadata(num_entries)
        infos = [self.tensor_info() for _ in range(num_tensors)]
        return GgufHeader(self.path, metadata, self.place(infos, metadata))

    def take(self, size: int) -> bytes:
        if size > self.size - self.at:
            raise CheckpointError(
                f"{self.path}: truncated: {size} bytes needed at {self.at}, the file has {self.size}"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, item_size: int, what: str) -> int:
        """A 64-bit count of items of at least `item_size` bytes each, which must fit the rest of the file."""
        number = self.u64()
        if number * item_size > self.size - self.at:
            raise CheckpointError(
                f"{self.path}: truncated or damaged: {number} {what} announced in {self.size} bytes"
            )
        return number

    def string(self) -> str:
        start = self.at
        try:
            return self.take(self.u64()).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: the string at byte {start} is not UTF-8") from error

    def metadata(self, num_entries: int) -> dict[str, Value]:
        entries: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self.string()
            if key in entries:
                raise CheckpointError(f"{self.path}: GGUF key {key!r} is there twice")
            entries[key] = self.value(self.u32(), key)
        return entries

    def value(self, kind: int, key: str) -> Value:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(key)
        scalar: Any = self.scalars(kind, 1, key)[0]
        # The shortest decimal that reads back as the same float32: 1e-05, not 9.999999747378752e-06.
        value: Value = float(str(np.float32(scalar))) if kind == FLOAT32 else scalar
        return value

    def array(self, key: str) -> list[Any]:
        kind = self.u32()
        if kind == STRING:
            return [self.string() for _ in range(self.count(8, f"strings in {key!r}"))]
        return self.scalars(kind, self.count(1, f"items in {key!r}"), key)

    def scalars(self, kind: int, number: int, key: str) -> list[Any]:
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path}: GGUF key {key!r} has the unknown or nested type {kind}")
        dtype = np.dtype(SCALARS[kind])
        if dtype == np.bool_:
            return [byte != 0 for byte in self.take(number)]
        items: list[Any] = np.frombuffer(self.take(number * dtype.itemsize), dtype).tolist()
        return items

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, row-major shape, ggml type, offset from the start of the data)."""
        name = self.string()
        num_dims = self.u32()
        if num_dims > MAX_DIMS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has {num_dims} dimensions (at most {MAX_DIMS})"
            )
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        return name, tuple(reversed(dims)), self.u32(), self.u64()

    def place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Value]
    ) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 or alignment > self.size:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}, not a multiple of 8")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} is there twice")
            tensors[name] = self.tensor(name, shape, kind, start, offset)
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} lies at {offset}, off the alignment {alignment}"
                )
        return tensors

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int, offset: int) -> GgufTensor:
        try:
            ggml_type = GGMLQuantizationType(kind)
        except ValueError:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} has the unknown type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if not shape or min(shape) == 0 or shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} of shape {list(shape)} does not fit {ggml_type.name} blocks"
            )
        nbytes = math.prod(shape) // block * block_bytes
        if start + offset + nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {start + offset + nbytes}, "
                f"the file at {self.size}; fetch it again"
            )
        return GgufTensor(name, ggml_type.name, shape, start + offset, nbytes)
