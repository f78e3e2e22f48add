"""How attention is cut into programs, from what the host knows of a step: sizes, and no token.

Two kinds of numbers. A `Tiling` fixes the order in which a row's sums are taken; it hangs on the model and
the GPU alone. A `Launch` says which programs there are; rows get the same bits under any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantd.kernels.gpu.tuning import Gpu
from quantd.kernels.ops import HeadShape

# Requests with more tokens than these in a step are prefilling, and computed apart from the others.
SHORT_LEN = 8
# What partial results may take, in bytes, unless those of a single split take more.
SCRATCH_BYTES = 128 << 20
# Programs wanted for each processor of the GPU, and so many at least along the context of a request,
# which may be far longer than the rest of its batch.
_PROGRAMS_PER_PROCESSOR = 16
_PROGRAMS_PER_CONTEXT = 16


@dataclass(frozen=True)
class Tiling:
    """tile_len: tokens of one dot. split_len: tokens whose sums start afresh, counted from position 0."""

    tile_len: int
    split_len: int = 256


@dataclass(frozen=True)
class Share:
    """The requests of a step that have min_len to max_len tokens in it, usual_len as a rule.

    max_tokens, max_requests: how many there may be.
    """

    min_len: int
    max_len: int
    usual_len: int
    max_tokens: int
    max_requests: int


@dataclass(frozen=True)
class Launch:
    """The programs of a share: num_tiles x key/value heads x num_programs.

    tile_rows: rows of one dot, each a token and a query head of the key/value head; num_tiles: tiles that
    hold the rows of all requests. direct: a program walks its whole context and writes the result. Else
    num_programs share the context, for num_splits splits at a time, and leave a partial result of each.
    """

    share: Share
    tile_rows: int
    num_tiles: int
    direct: bool
    num_splits: int
    num_programs: int

    @property
    def splits_per_program(self) -> int:
        return -(-self.num_splits // self.num_programs)


def tiling_for(dim: int, gpu: Gpu, value_bytes: int) -> Tiling:
    """The tiling of heads padded to `dim` elements, which take `value_bytes` each in the pool.

    A tile's keys and values lie in shared memory, loaded one tile ahead. Where there is much of it tiles
    are longer; in any case it holds several programs. Without tensor cores a dot wants registers instead.
    """
    if not gpu.has_dots:
        return Tiling(16)
    roomy = gpu.capability in (80, 87, 90, 100, 103)
    wide_dim = dim * 2 if value_bytes > 2 else dim
    return Tiling(64 if wide_dim <= (128 if roomy else 64) else 32)


def num_warps_for(launch: Launch, dim: int, gpu: Gpu, value_bytes: int) -> int:
    """Of a program. Codes that few rows meet are unpacked where they are multiplied, by as few warps as have
    registers for that: what goes from warp to warp waits.
    """
    if dim == 256 and (not gpu.has_dots or (launch.direct and value_bytes > 2)):
        return 8
    if not gpu.has_dots or launch.direct or launch.tile_rows > 16 or value_bytes > 1:
        return 4
    return max(tiling_for(dim, gpu, value_bytes=1).tile_len * max(dim, 128) // 4096, 1)


def max_registers(launch: Launch, dim: int, num_warps: int) -> int | None:
    """Registers that a thread may have; None for as many as the assembler finds best.

    Of a program that walks its whole context it keeps a few words in memory, to have room for one program
    more on a multiprocessor. So it is given the registers of three with a small tile, else of two.
    """
    if not launch.direct or num_warps != 4:
        return None
    return 168 if launch.tile_rows == 16 and dim <= 128 else 255


def plan(
    num_tokens: int, num_requests: int, num_splits: int, heads: HeadShape, gpu: Gpu
) -> tuple[Launch, ...]:
    """The launches that compute any step of so many tokens and requests, the longest of num_splits splits."""
    return tuple(_launch(share, num_splits, heads, gpu) for share in _shares(num_tokens, num_requests))


def _shares(num_tokens: int, num_requests: int) -> Iterator[Share]:
    if num_requests == 1 or num_tokens < num_requests + SHORT_LEN:
        # Every request has a token, so that none prefills, or all do. Where one does all the same, as a
        # recorded step may have requests without tokens, it is computed no less.
        yield Share(1, num_tokens, -(-num_tokens // num_requests), num_tokens, num_requests)
        return
    yield Share(1, SHORT_LEN, 1, min(num_tokens, SHORT_LEN * num_requests), num_requests)
    # As a rule one request prefills while the others decode.
    longer, usual_len = SHORT_LEN + 1, num_tokens - num_requests + 1
    yield Share(longer, num_tokens, usual_len, num_tokens, min(num_requests, num_tokens // longer))


def _launch(share: Share, num_splits: int, heads: HeadShape, gpu: Gpu) -> Launch:
    tile_rows = _tile_rows(share, heads, gpu)
    num_tiles = share.max_tokens * _group(heads) // tile_rows + share.max_requests
    programs = num_tiles * heads.num_kv_heads
    prefills = share.usual_len > SHORT_LEN
    if num_splits == 1 or (prefills and programs >= gpu.num_sms):
        return Launch(share, tile_rows, num_tiles, direct=True, num_splits=num_splits, num_programs=1)
    split_bytes = share.max_tokens * heads.num_heads * (heads.head_dim + 2) * 4
    at_once = min(max(SCRATCH_BYTES // split_bytes, 1), num_splits)
    wanted = max(-(-_PROGRAMS_PER_PROCESSOR * gpu.num_sms // programs), _PROGRAMS_PER_CONTEXT)
    return Launch(share, tile_rows, num_tiles, False, at_once, num_programs=min(wanted, at_once))


def _tile_rows(share: Share, heads: HeadShape, gpu: Gpu) -> int:
    """16, the least of a tensor core, or 32 where requests fill them and the sums find registers.

    Never more: from 64 on Triton takes other tensor core instructions on sm_90 and sm_100, which need not
    add in the same order.
    """
    fills = share.usual_len * _group(heads) > 16
    return 32 if fills and heads.head_dim <= 128 and gpu.has_dots else 16


def _group(heads: HeadShape) -> int:
    return heads.num_heads // heads.num_kv_heads
