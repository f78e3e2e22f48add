"""A block of keys and values as a file: a header that tells whose it is, then its bytes (torch-free).

Little-endian: magic, version, depth, length, kind, key, parent, checksum, data. The checksum is SHA-256 of
all the rest, for which processors have instructions.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import NamedTuple, TypeAlias

MAGIC = b"quantdKV"
VERSION = 1
DIGEST_BYTES = 32

_FIELDS = struct.Struct(f"<8sIIQ{3 * f'{DIGEST_BYTES}s'}")
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES

Data: TypeAlias = bytes | memoryview


class BlockFileError(Exception):
    """Why a file is no block that can be used; stays with those that read files."""


class BlockHeader(NamedTuple):
    """Which block it is.

    kind: of all that its bits depend on beside the tokens (see quantd.engine.disk_cache). key, parent: see
    quantd.engine.prefix_cache. depth: blocks of the prefix up to and with this one. num_bytes: of data.
    """

    kind: bytes
    key: bytes
    parent: bytes
    depth: int
    num_bytes: int


def encode_header(header: BlockHeader, data: Data) -> bytes:
    """What stands before `data` in its file."""
    fields = _FIELDS.pack(
        MAGIC, VERSION, header.depth, header.num_bytes, header.kind, header.key, header.parent
    )
    return fields + _checksum(fields, data)


def decode_header(content: Data) -> BlockHeader:
    """The header that a file begins with. Raises BlockFileError."""
    if len(content) < HEADER_BYTES:
        raise BlockFileError(f"it ends after {len(content)} bytes")
    magic, version, depth, num_bytes, kind, key, parent = _FIELDS.unpack_from(content)
    if magic != MAGIC:
        raise BlockFileError("it is no block of quantd's")
    if version != VERSION:
        raise BlockFileError(f"it is of version {version}, not {VERSION}")
    return BlockHeader(kind, key, parent, depth, num_bytes)


def decode(content: bytes, kind: bytes, key: bytes) -> memoryview:
    """The data of the file of block `key`. Raises BlockFileError where the file holds anything else."""
    header, data = decode_header(content), memoryview(content)[HEADER_BYTES:]
    if header.kind != kind:
        raise BlockFileError("it belongs to another model or cache format")
    if header.key != key:
        raise BlockFileError("it is the file of another block")
    if header.num_bytes != len(data):
        raise BlockFileError(f"it has {len(data)} bytes of data, not {header.num_bytes}")
    if _checksum(content[: _FIELDS.size], data) != content[_FIELDS.size : HEADER_BYTES]:
        raise BlockFileError("its checksum is wrong")
    return data


def _checksum(fields: Data, data: Data) -> bytes:
    digest = sha256(fields)
    digest.update(data)
    return digest.digest()
