"""Whole blocks copied within a pool, out to the host and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantd.kernels.gpu.kv_cache import copy_blocks, gather_blocks, page_strides, scatter_blocks
from quantd.quant.kv import FORMATS, KVPool, KVShape


def random_pool(device: str, num_blocks: int, block_bytes: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(256, (num_blocks, block_bytes), dtype=torch.uint8).to(device)


@pytest.mark.parametrize("block_bytes", [64, 4096, 5 * 4096 + 64])
@pytest.mark.parametrize(("source", "target"), [([], []), ([3], [0]), ([6, 1, 1], [2, 5, 0])])
def test_copy_blocks(block_bytes: int, source: list[int], target: list[int], gpu_device: str) -> None:
    pool = random_pool(gpu_device, 7, block_bytes)
    expected = pool.clone()
    expected[target] = pool[source]
    ids = [torch.tensor(blocks, dtype=torch.int32, device=gpu_device) for blocks in (source, target)]
    copy_blocks(pool, *ids)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("blocks", [[], [4], [2, 3, 4], [5, 0, 1, 6, 3]])
def test_blocks_out_to_the_host_and_back(blocks: list[int], gpu_device: str) -> None:
    pool = random_pool(gpu_device, 7, 192)
    host = torch.zeros(6, 192, dtype=torch.uint8, pin_memory=gpu_device == "cuda")
    gather_blocks(pool, blocks, host)
    if gpu_device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[: len(blocks)], pool[blocks].cpu())
    assert not host[len(blocks) :].any()
    other = torch.zeros_like(pool)
    scatter_blocks(other, blocks, host)
    expected = torch.zeros_like(pool)
    expected[blocks] = pool[blocks]
    assert torch.equal(other, expected)


def test_page_strides_lead_to_every_element() -> None:
    pool = KVPool.allocate(FORMATS["int8"], KVShape(3, 2, 20, 4), 5)
    layer = pool.layers()[1]
    assert layer.k_scale is not None
    layer.k[3, 1, 2, 7], layer.k_scale[3, 1, 2] = 9, 0.5
    strides = page_strides(layer)
    at = 3 * strides["block_stride"] + strides["HEAD_STRIDE"] + 2 * strides["TOKEN_STRIDE"] + 7
    codes = pool.data.view(torch.int8).flatten()[layer.k.storage_offset() :]
    assert codes[at] == 9
    at = 3 * strides["scale_block_stride"] + strides["SCALE_HEAD_STRIDE"] + 2
    scales = pool.data.view(torch.float32).flatten()[layer.k_scale.storage_offset() :]
    assert scales[at] == 0.5
    assert strides["BLOCK_SIZE"] == 4
