from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantd.engine.errors import RequestError
from quantd.engine.split import World, ends_in_layers, even, parse_split, plan_world, stage_memory


def stages(split: str, num_layers: int, free: tuple[float, ...] = (1, 1), ends: float = 0) -> list[int]:
    world = plan_world(1, split, num_layers, free, ends)
    assert [start for start, _ in world.stages] == [0, *(stop for _, stop in world.stages[:-1])]
    assert world.stages[-1][1] == num_layers
    return [stop - start for start, stop in world.stages]


@pytest.mark.parametrize(
    ("split", "num_layers", "expected"),
    [
        ("", 7, [7]),
        ("1", 7, [7]),
        ("1,1", 7, [4, 3]),
        ("3,1", 8, [6, 2]),
        ("24,8,8", 32, [20, 6, 6]),
        ("1000,1", 3, [2, 1]),
        ("0.5,0.25,0.25", 8, [4, 2, 2]),
        ("auto", 8, [4, 4]),
    ],
)
def test_layers_are_spread_by_shares(split: str, num_layers: int, expected: list[int]) -> None:
    assert stages(split, num_layers) == expected


def test_auto_fills_unequal_memories_alike_and_counts_the_first_stages_matrices() -> None:
    assert stages("auto", 32, free=(24e9, 8e9)) == [24, 8]
    assert stages("auto", 32, free=(8e9, 24e9), ends=4) == [5, 27]
    assert stages("auto", 4, free=(1e9, 1e9), ends=90) == [1, 3]


def test_a_stage_has_room_for_what_the_smallest_of_its_devices_has() -> None:
    assert stage_memory([24, 16, 8, 12], 2) == [16, 8]
    assert stage_memory([24, 16, 8], 2) == [16]
    assert stage_memory([24, 8], 1) == [24, 8]
    assert len(stage_memory([24], 2)) == 1


def test_the_matrices_of_the_first_stage_count_as_layers() -> None:
    """A 4-bit model of 8 billion: 32 layers of 0.11 GB, and two matrices of half a billion values in fp16."""
    assert 18 < ends_in_layers(2 * 128256 * 4096, 5_600_000_000, 32) < 19.5
    assert ends_in_layers(100, 50, 4) > 0


@pytest.mark.parametrize("split", ["auto,1", "1,", "0,1", "-1,2", "nan", "inf,1", "a", ",", "1;2"])
def test_what_is_no_split_is_refused(split: str) -> None:
    with pytest.raises(ValueError):
        parse_split(split)
    with pytest.raises(RequestError, match="split is") as caught:
        plan_world(1, split, 8, (1, 1), 0)
    assert caught.value.param == "split"


def test_more_stages_than_layers_and_no_ranks_are_refused() -> None:
    with pytest.raises(RequestError, match="3 stages, but the model has 2 layers"):
        plan_world(1, "1,1,1", 2, (1, 1), 0)
    with pytest.raises(RequestError, match="tp is 0"):
        plan_world(0, "", 2, (1, 1), 0)


def test_ranks_of_a_stage_are_neighbours() -> None:
    world = World(2, ((0, 3), (3, 5)))
    assert world.size == 4
    assert [(world.stage(r), world.place(r), world.layers(r)) for r in range(4)] == [
        (0, 0, range(3)),
        (0, 1, range(3)),
        (1, 0, range(3, 5)),
        (1, 1, range(3, 5)),
    ]
    assert [world.peers(r) for r in range(4)] == [range(2), range(2), range(2, 4), range(2, 4)]


def test_231_groups_over_two_ranks() -> None:
    """Qwen2-72B: 29568 inputs in groups of 128."""
    assert even(29568, 2, 128) == [range(116 * 128), range(116 * 128, 29568)]


@given(total=st.integers(1, 300), parts=st.integers(1, 8), unit=st.integers(1, 40))
def test_even_parts_cover_all_in_whole_units(total: int, parts: int, unit: int) -> None:
    units = -(-total // unit)
    if units < parts:
        with pytest.raises(AssertionError):
            even(total, parts, unit)
        return
    runs = even(total, parts, unit)
    assert [i for run in runs for i in run] == list(range(total))
    sizes = [-(-len(run) // unit) for run in runs]
    assert all(run.start % unit == 0 for run in runs)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
