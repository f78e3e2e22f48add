"""Frames on a stream socket: a 4-byte little-endian length, then a msgpack object (torch-free)."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
# Far beyond any message; only what is no frame announces more.
MAX_FRAME = 1 << 30


def encode_frame(message: msgspec.Struct) -> bytes:
    """A message as one frame."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame.

    Raises EOFError when the other side is gone, ConnectionError where it sends what is no frame.
    """
    return await reader.readexactly(_length_of(await reader.readexactly(_LENGTH.size)))


def _length_of(head: bytes) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME:
        raise ConnectionError(f"a frame of {length} bytes is none")
    return length


class Connection:
    """An engine's or a rank's end, which blocks. One thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")

    def send(self, message: msgspec.Struct) -> None:
        self._socket.sendall(encode_frame(message))

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Wait for the next message. Raises EOFError and ConnectionError as `read_frame`."""
        return decoder.decode(self._read(_length_of(self._read(_LENGTH.size))))

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError("the other side closed the connection")
        return data
