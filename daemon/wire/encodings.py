"""Bodies that come compressed (RFC 9110, section 8.4), never larger than a plain one may be.

The HTTP library could do this too, but tells what is wrong with them in its own words and not a dialect's.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Mapping

from aiohttp import web

from quantd.daemon.wire.incoming import read_all
from quantd.engine.errors import RequestError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Decoder = Callable[[bytes, int], bytes]
"""The first bytes, so many at most, of what was compressed."""


def _unzstd(data: bytes, size: int) -> bytes:
    return zstd.ZstdFile(io.BytesIO(data)).read(size)


def _gunzip(data: bytes, size: int) -> bytes:
    return gzip.GzipFile(fileobj=io.BytesIO(data)).read(size)


def _inflate(data: bytes, size: int) -> bytes:
    decoder = zlib.decompressobj()
    found = decoder.decompress(data, size)
    if len(found) < size and not decoder.eof:
        raise EOFError
    return found


_DECODERS: Mapping[str, Decoder] = {"zstd": _unzstd, "gzip": _gunzip, "deflate": _inflate}


async def read_data(request: web.Request) -> bytes:
    """A request's body as it was before it was compressed.

    Raises RequestError for one that is broken, HTTPUnsupportedMediaType for an encoding that is not known,
    and as `read_all`.
    """
    data = await read_all(request)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return data
    if encoding not in _DECODERS:
        raise web.HTTPUnsupportedMediaType(
            reason=f"Content-Encoding {encoding[:100]} is not known",
            headers={"Accept-Encoding": ", ".join(_DECODERS)},
        )
    return await asyncio.to_thread(_decode, data, encoding, request.client_max_size)


def _decode(data: bytes, encoding: str, max_size: int) -> bytes:
    try:
        found = _DECODERS[encoding](data, max_size + 1)
    except (EOFError, OSError, zlib.error, zstd.ZstdError):
        raise RequestError(f"the body is not {encoding}, as its Content-Encoding says, or is cut") from None
    if len(found) > max_size:
        raise web.HTTPRequestEntityTooLarge(max_size, len(found))
    return found
