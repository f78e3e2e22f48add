"""Block pool memory: layout, sizes, alignment, lazy commitment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantd.quant.kv import ALIGNMENT, FORMATS, KVPool, KVShape, block_bytes

SHAPES = [
    pytest.param(KVShape(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16), id="smollm2-like"),
    pytest.param(KVShape(num_layers=3, num_kv_heads=1, head_dim=10, block_size=5), id="odd"),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    # 30 layers x 2 x (3 heads x 16 tokens x 64 values [+ 3 x 16 scales of 4 bytes])
    [("int8", 60 * (3072 + 192)), ("fp16", 60 * 6144), ("bf16", 60 * 6144), ("fp32", 60 * 12288)],
)
def test_block_bytes(name: str, expected: int) -> None:
    shape = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    assert block_bytes(FORMATS[name], shape) == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_views_have_the_contract_shapes_and_alignment(name: str, shape: KVShape) -> None:
    pool = KVPool.allocate(FORMATS[name], shape, num_blocks=4)
    layers = pool.layers()
    assert len(layers) == shape.num_layers
    for layer in layers:
        for codes, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
            assert codes.shape == (4, *shape.codes)
            assert codes.dtype == FORMATS[name].dtype
            assert codes[1].is_contiguous()
            assert codes[1].data_ptr() % ALIGNMENT == 0
            assert (scales is not None) == FORMATS[name].scaled
            if scales is not None:
                assert scales.shape == (4, *shape.scales)
                assert scales.dtype == torch.float32
                assert scales[1].data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_never_overlap_and_a_block_is_one_object(name: str, shape: KVShape) -> None:
    pool = KVPool.allocate(FORMATS[name], shape, num_blocks=3)
    parts = [part for layer in pool.layers() for part in (layer.k, layer.k_scale, layer.v, layer.v_scale)]
    tensors = [part for part in parts if part is not None]
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, 1))

    pool.data[2] = pool.data[0]
    for tensor in tensors:
        tensor[0].zero_()
    assert all((tensor[2] == number).all() for number, tensor in enumerate(tensors, 1))
    assert all((tensor[1] == number).all() for number, tensor in enumerate(tensors, 1))


def test_a_new_pool_is_zero() -> None:
    pool = KVPool.allocate(FORMATS["int8"], KVShape(1, 2, 8, 4), num_blocks=2)
    assert not pool.data.any()


def test_a_large_pool_costs_only_what_is_written() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    shape = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    before = resident_bytes()
    pool = KVPool.allocate(FORMATS["int8"], shape, num_blocks=20_000)
    pool.data[123].fill_(1)
    pool.layers()[7].k[19_999] = 5
    assert pool.nbytes > 3.5e9
    assert resident_bytes() - before < 50e6
