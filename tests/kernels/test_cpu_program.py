"""A recorded forward: the same bits as its ops one by one, for any number of tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from cpu_cases import HEADS, Pool, cpu_ops, quantized, rope_table
from torch import Tensor

from quantd.kernels.cpu.ops import CpuOps
from quantd.kernels.cpu.program import Replay
from quantd.kernels.ops import AttentionInputs, KVLayer

HIDDEN = 576
LENGTHS = [50, 3, 21]


class Forward:
    """Two layers of a decoder with everything that is fused, and something that is not."""

    def __init__(self, ops: CpuOps) -> None:
        torch.manual_seed(1)
        self.ops = ops
        self.embedding = ops.pack(quantized(100, HIDDEN, 4, 32))
        self.qkv = [ops.pack(quantized(n, HIDDEN, 4, 32)) for n in (576, 384)]
        self.o = ops.pack(quantized(HIDDEN, 576, 4, 64), torch.randn(HIDDEN))
        self.gate_up = [ops.pack(quantized(2 * width, HIDDEN, 8, 32)) for width in (80, 75)]
        self.down = [ops.pack(quantized(HIDDEN, width, 3, width)) for width in (80, 75)]
        self.norm = torch.rand(HIDDEN) * 0.1
        self.rope = rope_table(64)

    def __call__(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        ops = self.ops
        x = ops.embedding(token_ids, self.embedding)
        normed = ops.rms_norm(x, self.norm, 1e-5)
        for layer, gate_up, down in zip(kv, self.gate_up, self.down, strict=True):
            qkv = ops.concat([ops.linear(normed, piece) for piece in self.qkv])
            q = ops.rope_kv_write(qkv, HEADS, inputs, layer, self.rope)
            mixed = ops.linear(ops.attention(q, HEADS, inputs, layer, 0.1), self.o)
            normed, x = ops.add_rms_norm(mixed, x, self.norm, 1e-5, 0.5)
            gated = ops.glu(ops.linear(normed, gate_up), "silu")
            normed, x = ops.add_rms_norm(ops.linear(gated, down), x, self.norm, 1e-5)
        return normed


def steps(pool: Pool) -> list[AttentionInputs]:
    """A prefill in two uneven parts, decoding, and everything at once."""
    return [
        pool.inputs([(0, 0, 30), (1, 0, 2)]),
        pool.inputs([(2, 0, 20), (0, 30, 49)]),
        pool.inputs([(0, 49, 50)]),
        pool.inputs([(1, 2, 3), (2, 20, 21)]),
        pool.whole(),
    ]


def run(forward: object, pool: Pool, kv: list[KVLayer]) -> list[Tensor]:
    assert callable(forward)
    ids = torch.arange(100, dtype=torch.int32)
    return [forward(ids[: len(inputs.positions)] % 97, inputs, kv) for inputs in steps(pool)]


@pytest.mark.parametrize("activations", ["auto", "fp32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_replay_has_the_bits_of_its_ops(activations: str, threads: int) -> None:
    ops = cpu_ops("auto" if activations == "auto" else "fp32", threads=threads)
    forward, pool = Forward(ops), Pool.scattered(LENGTHS, 16)
    expected = run(forward, pool, [pool.layer("int8", HEADS) for _ in range(2)])
    actual = run(ops.compile(forward), pool, [pool.layer("int8", HEADS) for _ in range(2)])
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), i
        assert b.isfinite().all()


def test_another_pool_is_recorded_anew() -> None:
    ops, pool = cpu_ops(), Pool.scattered(LENGTHS, 16)
    replay = ops.compile(Forward(ops))
    first = run(replay, pool, [pool.layer("int8", HEADS) for _ in range(2)])
    second = run(replay, pool, [pool.layer("int8", HEADS) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_results_of_a_step_outlive_the_next() -> None:
    ops, pool = cpu_ops(), Pool.scattered(LENGTHS, 16)
    replay, kv = ops.compile(Forward(ops)), [pool.layer("int8", HEADS) for _ in range(2)]
    inputs = pool.whole()
    ids = torch.zeros(len(inputs.positions), dtype=torch.int32)
    first = replay(ids, inputs, kv)
    kept = first.clone()
    replay(ids + 5, inputs, kv)
    assert torch.equal(first, kept)


def test_arithmetic_of_other_kinds_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    ops, pool = cpu_ops(), Pool.scattered(LENGTHS, 16)
    forward = Forward(ops)

    def shifted(token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        return ops.rms_norm(forward(token_ids, inputs, kv) + 1, forward.norm, 1e-5)

    replay = ops.compile(shifted)
    kv = [pool.layer("int8", HEADS) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        actual = run(replay, pool, kv)
    expected = run(shifted, pool, [pool.layer("int8", HEADS) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len(caplog.records) == 1


def test_what_a_gated_activation_reads_is_there_for_others_too() -> None:
    ops, pool = cpu_ops(), Pool.scattered(LENGTHS, 16)
    layers = Forward(ops)

    def forward(token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        both = ops.linear(ops.embedding(token_ids, layers.embedding), layers.gate_up[0])
        return ops.concat([ops.glu(both, "silu"), both])

    actual, expected = run(ops.compile(forward), pool, []), run(forward, pool, [])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_arena_is_no_wider_than_what_is_alive() -> None:
    ops, pool = cpu_ops(), Pool.scattered(LENGTHS, 16)
    replay = ops.compile(Forward(ops))
    run(replay, pool, [pool.layer("int8", HEADS) for _ in range(2)])
    assert isinstance(replay, Replay)
    program = replay._program
    assert program is not None
    # Alive at most: the parts of qkv and their concatenation, the residual, the normed input.
    assert program._width <= 2 * 960 + 3 * HIDDEN
