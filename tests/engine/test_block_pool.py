from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantd.engine.block_pool import HELD, BlockPool


def test_blocks_are_allocated_in_order_and_run_out() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="empty pool"):
        pool.allocate()


def test_released_to_keep_is_reused_last_and_else_first() -> None:
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    pool.release(0, keep=True)
    pool.release(2, keep=False)
    pool.release(1, keep=True)
    assert list(pool.free_blocks()) == [2, 3, 0, 1]


def test_share_takes_a_free_block_out_of_the_list() -> None:
    pool = BlockPool(3)
    pool.share(1)
    pool.share(1)
    assert list(pool.free_blocks()) == [0, 2]
    pool.release(1, keep=True)
    assert list(pool.free_blocks()) == [0, 2]
    pool.release(1, keep=True)
    assert list(pool.free_blocks()) == [0, 2, 1]
    with pytest.raises(AssertionError, match="block 1"):
        pool.release(1, keep=True)


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.allocate()
    pool.ref_counts[0] = 0
    with pytest.raises(AssertionError):
        pool.check()


@given(
    st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["take", "share", "release"])))
)
def test_counts_match_a_model(num_blocks: int, moves: list[tuple[int, str]]) -> None:
    pool, held, kept = BlockPool(num_blocks), Counter[int](), set[int]()
    for block, move in moves:
        if move == "take" and pool.num_free:
            held[pool.allocate()] += 1
        elif move == "share" and block < num_blocks:
            pool.share(block)
            held[block] += 1
        elif move == "release" and held[block]:
            held[block] -= 1
            pool.release(block, keep=bool(block % 2))
            kept |= {block} if block % 2 else set()
        pool.check()
        assert pool.ref_counts == [held[block] for block in range(num_blocks)]
        num_held = [bool(held[block]) for block in range(num_blocks)]
        assert pool.counts(HELD, 1) == num_held
        assert pool.counts(HELD, 2) == [sum(num_held[i : i + 2]) for i in range(0, num_blocks, 2)]
        kept = {block for block in kept if not held[block]}
        assert pool.num_kept == len(kept)
