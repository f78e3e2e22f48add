"""The size of the block pool, and what the machine reports."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantd.engine.config import Allowance, EngineConfig
from quantd.engine.devices import plan_ranks
from quantd.engine.errors import CapacityError
from quantd.engine.machine import available_memory
from quantd.engine.memory import (
    GOOD_LEN,
    cpu_room,
    gpu_room,
    plan_blocks,
    plan_rank_blocks,
    reserve,
    workspace_bytes,
)
from quantd.engine.memory_plan import plan_memory
from quantd.engine.models.spec import DecoderSpec, LayerSpec
from quantd.engine.rank_messages import RankLoaded
from quantd.kernels.machine import physical_cores
from quantd.kernels.ops import HeadShape

MIB, GIB = 1 << 20, 1 << 30


def config(**values: int) -> EngineConfig:
    return EngineConfig(model_path="unused", **values)  # type: ignore[arg-type]


def test_a_quarter_of_free_memory() -> None:
    assert plan_blocks(config(), 2048, MIB, cpu_room(16 * GIB)) == 4 * 1024


def test_more_where_one_request_needs_it_but_never_the_reserve() -> None:
    assert plan_blocks(config(), 131_072, MIB, cpu_room(16 * GIB)) == 8192
    assert plan_blocks(config(), 196_608, MIB, cpu_room(16 * GIB)) == 12 * 1024


def test_a_context_nobody_asked_for_shrinks_to_what_fits_and_one_asked_for_does_not() -> None:
    assert plan_blocks(config(), 262_144, MIB, cpu_room(16 * GIB)) == 12 * 1024
    with pytest.raises(CapacityError, match="max_model_len to 196608 or less"):
        plan_blocks(config(max_model_len=262_144), 262_144, MIB, cpu_room(16 * GIB))


def test_no_more_than_all_requests_can_use() -> None:
    assert plan_blocks(config(max_num_requests=3), 100, MIB, cpu_room(64 * GIB)) == 3 * 7


def test_kv_memory_is_taken_as_given_even_below_one_request() -> None:
    assert plan_blocks(config(kv_memory=32 * MIB + 5), 2048, MIB, cpu_room(0)) == 32


def test_kv_memory_below_one_block_is_refused_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"999 bytes.*1000"):
        plan_blocks(config(kv_memory=999), 2048, 1000, cpu_room(GIB))


def test_too_little_for_a_useful_request_is_refused_with_both_numbers_and_a_length_that_fits() -> None:
    with pytest.raises(CapacityError, match=r"2048 tokens takes 128 MiB.*100 MiB.*max_model_len to 1600"):
        plan_blocks(config(), 8192, MIB, cpu_room(200 * MIB))
    assert plan_blocks(config(max_model_len=1600), 1600, MIB, cpu_room(200 * MIB)) == 100
    assert plan_blocks(config(), 512, MIB, cpu_room(200 * MIB)) == 50


@pytest.mark.parametrize(
    ("available", "left"), [(600 * MIB, 300 * MIB), (3 * GIB, GIB), (4 * GIB, GIB), (64 * GIB, 16 * GIB)]
)
def test_reserve(available: int, left: int) -> None:
    assert reserve(available) == left


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal: 16000000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"proc/self/cgroup": "0::/a/b\n"}, 8_192_000, id="no-limit-visible"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "10\n",
                "sys/fs/cgroup/a/b/memory.stat": "anon 10\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "2000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1500\ninactive_file 500\n",
            },
            3500,
            id="v2-limit-of-an-ancestor",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu:/x\n2:memory,other:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "4500\n",
                "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 100\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
                "sys/fs/cgroup/memory/memory.stat": "",
            },
            0,
            id="v1-over-its-limit",
        ),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert available_memory(tmp_path / "proc", tmp_path / "sys") == expected


def test_this_machine_has_memory_and_cores() -> None:
    assert available_memory() > 100 * MIB
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))


def test_hyperthreads_share_a_core(tmp_path: Path) -> None:
    for cpu in os.sched_getaffinity(0):
        siblings = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-999\n"}
        write(tmp_path, siblings)
    assert physical_cores(tmp_path / "sys") == 1


def rank(device: str, block_bytes: int, available: int) -> RankLoaded:
    return RankLoaded(device=device, weight_bytes=0, block_bytes=block_bytes, available=available)


def test_ranks_on_one_device_share_what_it_has_left() -> None:
    one = plan_rank_blocks(config(), 1 << 20, [rank("cpu", 3000, 8 << 30)])
    two = plan_rank_blocks(config(), 1 << 20, [rank("cpu", 2000, 9 << 30), rank("cpu", 1000, 8 << 30)])
    assert one == two == plan_blocks(config(), 1 << 20, 3000, cpu_room(8 << 30))


def test_a_gpu_gives_all_but_the_reserve_and_the_workspace() -> None:
    ranks = [rank("cuda:0", MIB, 24 << 30)]
    assert plan_rank_blocks(config(), 1 << 20, ranks, workspace=3 * GIB) == 20 * 1024
    assert plan_rank_blocks(config(vram_reserve=0), 1 << 20, ranks, workspace=3 * GIB) == 21 * 1024
    assert plan_rank_blocks(config(max_num_requests=2), 160, ranks, workspace=3 * GIB) == 20


def test_a_gpu_without_room_is_refused_with_what_is_set_aside() -> None:
    with pytest.raises(
        CapacityError, match=r"2048 tokens.*100 MiB can be had \(2148 MiB is free, 2048 MiB of"
    ):
        plan_blocks(config(), 8192, MIB, gpu_room(2148 * MIB, GIB, GIB))
    assert gpu_room(GIB, GIB, GIB).limit == 0


def test_what_other_engines_were_promised_is_not_counted_on() -> None:
    ranks = [rank("cpu", MIB, 16 * GIB)]
    allowed = msgspec.structs.replace(config(), allowance=Allowance(promised=8 * GIB))
    assert plan_rank_blocks(allowed, 2048, ranks) == plan_blocks(config(), 2048, MIB, cpu_room(8 * GIB))
    gpu = [rank("cuda:0", MIB, 16 * GIB)]
    assert plan_rank_blocks(allowed, 1 << 20, gpu) == plan_rank_blocks(config(), 1 << 20, gpu)


def test_a_limit_holds_for_weights_and_pool_together() -> None:
    ranks = [RankLoaded(device="cpu", weight_bytes=GIB, block_bytes=MIB, available=16 * GIB)]
    allowed = msgspec.structs.replace(config(), allowance=Allowance(limit=3 * GIB))
    assert plan_rank_blocks(allowed, 1 << 20, ranks) == 2048
    with pytest.raises(CapacityError) as caught:
        plan_rank_blocks(msgspec.structs.replace(allowed, kv_memory=4 * GIB), 1 << 20, ranks)
    assert caught.value.shortage == 2 * GIB


@given(free=st.integers(-(64 << 30), 8 << 30), blocks=st.integers(1, 1 << 14), gpu=st.booleans())
def test_a_shortage_is_what_must_become_free(free: int, blocks: int, gpu: bool) -> None:
    asked = config(max_model_len=16 * blocks)

    def plan(free: int) -> int:
        return plan_rank_blocks(asked, 16 * blocks, [rank("cuda:0" if gpu else "cpu", MIB, free)], GIB * gpu)

    try:
        assert plan(free) >= blocks
    except CapacityError as error:
        assert error.shortage > 0
        assert plan(free + error.shortage) >= blocks
        with pytest.raises(CapacityError):
            plan(free + error.shortage - 3)


def test_kv_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(CapacityError, match="4096 MiB was asked for, but 3072 MiB") as caught:
        plan_rank_blocks(config(kv_memory=4 * GIB), 1 << 20, [rank("cpu", MIB, 3 * GIB)])
    assert caught.value.shortage == GIB


def test_a_plan_tells_all_numbers_and_refuses_with_them() -> None:
    ranks = [RankLoaded(device="cpu", weight_bytes=3 * 10**9, block_bytes=10**6, available=10**9)]
    allowed = msgspec.structs.replace(config(), allowance=Allowance(promised=5 * 10**8, limit=4 * 10**9))
    plan = plan_memory(allowed, "cpu avx2", 8192, ranks)
    assert plan.refusal() is None
    assert plan.table == [
        ("weights", "3.0 GB"),
        ("KV a 1000 tokens", "62.5 MB (int8)"),
        ("workspace", "0 B"),
        ("left to others", "250.0 MB"),
        ("free", "3.5 GB on cpu, beside 500.0 MB of other models"),
        ("limit", "4.0 GB (max_memory, less other models)"),
        ("KV cache", f"{plan.kv_tokens} tokens ({plan.num_blocks}.0 MB)"),
    ]
    assert plan.num_blocks == 250 and plan.kv_bytes_of(17) == 2 * 10**6
    short = plan_memory(msgspec.structs.replace(allowed, max_model_len=8192), "cpu avx2", 8192, ranks)
    refusal = short.refusal()
    assert refusal is not None and refusal.on_gpu is None
    unlimited = plan_memory(config(max_model_len=1 << 20), "cpu avx2", 1 << 20, ranks).refusal(urgent=False)
    assert unlimited is not None and (unlimited.urgent, unlimited.on_gpu) == (False, False)
    assert refusal.shortage == short.shortage > 0 == short.kv_tokens
    assert re.match(r"(?s)one request of 8192 tokens takes.*\n  weights +3.0 GB\n.*wanting", str(refusal))
    assert plan_memory(allowed, "cpu avx2", 8192, ranks, least_len=GOOD_LEN).fault is not None


def test_the_device_with_the_least_room_decides() -> None:
    ranks = [rank("cuda:0", 1000, 24 << 30), rank("cuda:1", 3000, 24 << 30), rank("cuda:2", 1000, 12 << 30)]
    room = gpu_room(24 << 30, GIB, MIB)
    assert plan_rank_blocks(config(), 1 << 20, ranks, MIB) == plan_blocks(config(), 1 << 20, 3000, room)


MODEL_8B = DecoderSpec(
    model_type="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    heads=HeadShape(32, 8, 128),
    layers=(LayerSpec(),) * 32,
    ropes=(),
    max_model_len=8192,
    norm_eps=1e-5,
    attention_scale=1.0,
    tied=False,
)


def test_an_automatic_split_fills_what_computing_and_other_programs_leave_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 GB of weights, 2 of them embedding and output matrix, over a GPU of 24 GB and one of 8."""
    free = [24 * 10**9, 8 * 10**9]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr("quantd.engine.devices.rank_memory", lambda device: free[device.index])
    ends = 2 * 2 * 128_256 * 4096
    layer = (16 * 10**9 - ends) / 32
    for reserved, layers in ((GIB, 24), (3 * GIB, 26)):
        asked = msgspec.structs.replace(config(vram_reserve=reserved), backend="gpu", split="auto")
        world = plan_ranks(asked, MODEL_8B, 16 * 10**9)
        counts = [stop - start for start, stop in world.stages]
        left = [size - reserved - workspace_bytes(asked, MODEL_8B) for size in free]
        filled = [(counts[0] * layer + ends) / left[0], counts[1] * layer / left[1]]
        assert counts[0] == layers and abs(filled[0] - filled[1]) < layer / left[1]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_workspace_covers_what_a_model_of_8b_takes(backend: str) -> None:
    """512 rows of a joined MLP matrix in float32, and the logits of 64 requests three times, are in it."""
    spec, asked = MODEL_8B, msgspec.structs.replace(config(), backend=backend)
    workspace = workspace_bytes(asked, spec)
    assert 512 * 3 * 14_336 * 4 + 3 * 64 * 128_256 * 4 < workspace < GIB
    more = msgspec.structs.replace(asked, max_num_tokens=4096)
    assert workspace_bytes(more, spec) > workspace + 3584 * 3 * 14_336 * 4


def test_what_computing_takes_on_a_cpu_is_told_and_in_its_reserve() -> None:
    ranks, asked = [rank("cpu", MIB, 3 * GIB)], config(kv_memory=3 * GIB)
    assert plan_rank_blocks(asked, 1 << 20, ranks, workspace=GIB) == 3 * 1024
    plan = plan_memory(asked, "cpu avx2", 1 << 20, ranks, workspace=10**9)
    assert ("workspace", "1.0 GB") in plan.table


def test_kv_memory_is_that_of_all_ranks_together() -> None:
    ranks = [rank("cuda:0", 1000, 24 << 30), rank("cuda:1", 3000, 24 << 30)]
    assert plan_rank_blocks(config(kv_memory=40_000), 1 << 20, ranks) == 10
