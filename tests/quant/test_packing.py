import math

import numpy as np
import pytest
import torch
from checkpoint_writer import AWQ_COLUMNS, pack_awq, pack_padded, pack_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from quantd.quant import packing

BITS = (2, 3, 4, 8)


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), count=st.integers(1, 100), seed=st.integers(0, 2**31))
def test_unpacking_undoes_packing_at_every_width_and_length(bits, count, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, count))
    dense, padded = pack_rows(codes, bits), pack_padded(codes, bits)
    assert dense.shape[1] == packing.stream_words(count, bits)
    assert packing.unpack_stream(dense, bits, count).tolist() == codes.tolist()
    assert packing.unpack_padded(padded, bits, count).tolist() == codes.tolist()


def test_three_bit_codes_straddle_words():
    codes = np.arange(32)[None] * 5 % 8
    words = pack_rows(codes, 3)
    assert words.shape == (1, 3)
    assert packing.unpack_stream(words, 3, 32).tolist() == codes.tolist()


def test_awq_nibbles_are_interleaved():
    assert tuple(AWQ_COLUMNS) == packing.AWQ_ORDER
    word = torch.tensor([[0x75316420]], dtype=torch.int32)  # nibble i holds column 0, 2, 4, 6, 1, 3, 5, 7
    assert packing.split_fields(word, 4, packing.AWQ_ORDER).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    codes = np.random.default_rng(1).integers(0, 16, (5, 24))
    assert packing.split_fields(pack_awq(codes), 4, packing.AWQ_ORDER).tolist() == codes.tolist()


def test_v1_zero_points_wrap_inside_their_field():
    """Case c19 (3): adding one to the packed word would carry into the neighbours."""
    stored = packing.unpack_stream(torch.tensor([[0x1D860EF7]], dtype=torch.int32), 4, 8)
    assert packing.decode_zeros(stored, 4, 1).tolist() == [[8, 0, 15, 1, 7, 9, 14, 2]]
    assert packing.decode_zeros(stored, 4, 2).tolist() == stored.tolist()


@pytest.mark.parametrize("bits", BITS)
def test_every_v1_zero_point_comes_back(bits):
    zeros = torch.arange(2**bits, dtype=torch.uint8)
    stored = (zeros.int() - 1).remainder(2**bits).to(torch.uint8)
    assert torch.equal(packing.decode_zeros(stored, bits, 1), zeros)


@pytest.mark.parametrize("bits", BITS)
def test_uniform_zero_points_show_their_convention(bits):
    middle = 2 ** (bits - 1)
    assert packing.uniform_zero(torch.full((2, 8), middle - 1, dtype=torch.uint8), bits) == 1
    assert packing.uniform_zero(torch.full((2, 8), middle, dtype=torch.uint8), bits) == 2
    mixed = torch.full((2, 8), middle, dtype=torch.uint8)
    mixed[1, 3] -= 1
    assert packing.uniform_zero(mixed, bits) is None
    assert packing.uniform_zero(torch.full((2, 8), 2**bits - 1, dtype=torch.uint8), bits) is None


@settings(max_examples=80, deadline=None)
@given(k=st.integers(1, 70), size=st.integers(1, 80), seed=st.integers(0, 2**31), shuffled=st.booleans())
def test_any_assignment_of_inputs_to_groups_is_exact(k, size, seed, shuffled):
    groups = -(-k // size)
    rng = np.random.default_rng(seed)
    g_idx = rng.integers(0, groups, k) if shuffled else np.sort(rng.integers(0, groups, k))
    codes = rng.integers(0, 16, (4, k))
    scale, zero = rng.random((4, groups)).astype(np.float16), rng.integers(0, 16, (4, groups))
    weight = packing.group(
        torch.from_numpy(codes).to(torch.uint8),
        packing.affine(torch.from_numpy(scale), torch.from_numpy(zero)),
        4,
        size,
        torch.from_numpy(g_idx),
    )
    expected = scale.astype(np.float64)[:, g_idx] * (codes - zero[:, g_idx])
    np.testing.assert_array_equal(weight.dequantize().double().numpy(), expected)
    if weight.perm is not None:
        assert sorted(weight.perm.tolist()) == list(range(k))


def test_equal_groups_keep_their_size_and_trivial_ones_need_no_permutation():
    codes = torch.zeros(2, 128, dtype=torch.uint8)
    scale_offset = packing.affine(torch.ones(2, 4), 0)
    shuffled = packing.group(codes, scale_offset, 4, 32, (5 * torch.arange(128) + 3) % 4)
    assert shuffled.group_size == 32 and shuffled.perm is not None and shuffled.scale.shape == (2, 4)
    trivial = packing.group(codes, scale_offset, 4, 32, torch.arange(128, dtype=torch.int32) // 32)
    assert trivial.group_size == 32 and trivial.perm is None


def test_unequal_groups_become_runs_of_their_greatest_common_divisor():
    g_idx = torch.tensor([0] * 48 + [1] * 32 + [2] * 40)[
        torch.randperm(120, generator=torch.Generator().manual_seed(1))
    ]
    weight = packing.group(
        torch.zeros(1, 120, dtype=torch.uint8), packing.affine(torch.ones(1, 3), 0), 4, 40, g_idx
    )
    assert weight.group_size == math.gcd(48, 80)
    assert weight.scale.shape == (1, 8)
