import pytest
from fakes import make_request

from quantd.engine.cache_manager import CacheManager
from quantd.engine.plan import RequestState
from quantd.engine.prefix_cache import block_keys

PROMPT = list(range(10, 22))


def make_state(name: str, prompt: list[int] = PROMPT, salt: str = "", **sampling: object) -> RequestState:
    return RequestState(make_request(name, prompt, salt, **sampling))


def compute(cache: CacheManager, state: RequestState, num_tokens: int | None = None) -> None:
    """Admit a request if it is new and compute its next tokens, by default all of them."""
    if not state.blocks:
        assert cache.admit(state, headroom=0)
    num_tokens = num_tokens or state.num_tokens - state.num_computed
    assert cache.append(state, num_tokens)
    state.num_computed += num_tokens


def test_blocks_come_chunk_by_chunk() -> None:
    cache, state = CacheManager(8, 4), make_state("a")
    compute(cache, state, 5)
    assert state.blocks == [0, 1]
    compute(cache, state, 3)
    assert state.blocks == [0, 1]
    compute(cache, state, 1)
    assert state.blocks == [0, 1, 2]
    cache.check([state])


def test_a_hit_never_covers_the_whole_prompt() -> None:
    cache, first, second = CacheManager(8, 4), make_state("a"), make_state("b")
    compute(cache, first)
    assert cache.admit(second, headroom=0)
    assert (second.blocks, second.num_computed) == ([0, 1], 8)
    compute(cache, second)
    assert second.blocks == [0, 1, 3], "the last block is computed again, apart"
    cache.check([first, second])


def test_released_blocks_are_found_until_reused_deep_end_first() -> None:
    cache, first = CacheManager(4, 4), make_state("a", [*PROMPT, 1])
    compute(cache, first)
    cache.free(first)
    cache.check([])
    assert (cache.pool.num_free, cache.num_cached) == (4, 3)
    other = make_state("b", [5] * 6)
    compute(cache, other)
    assert other.blocks == [3, 2], "the empty block, then the deepest of the prefix"
    assert cache.num_evictions == 1
    again = make_state("c")
    assert cache.admit(again, headroom=0) is False, "two hits and one new block, of two free"
    cache.free(other)
    compute(cache, again)
    assert again.blocks[:2] == [0, 1]
    cache.check([again])


def test_salts_do_not_share() -> None:
    cache, first, second = CacheManager(8, 4), make_state("a", salt="x"), make_state("b", salt="y")
    compute(cache, first)
    compute(cache, second)
    assert not set(first.blocks) & set(second.blocks)


def test_generated_tokens_are_found_too() -> None:
    cache, first = CacheManager(8, 4), make_state("a", PROMPT[:3])
    compute(cache, first)
    first.output.append(9)
    compute(cache, first)
    second = make_state("b", [*PROMPT[:3], 9, 9])
    compute(cache, second)
    assert second.blocks[0] == first.blocks[0]


def test_a_block_that_is_not_full_is_not_found() -> None:
    cache, first, second = CacheManager(8, 4), make_state("a"), make_state("b")
    compute(cache, first, 7)
    assert cache.admit(second, headroom=0)
    assert second.num_computed == 4


def test_prompt_logprobs_read_no_hit_but_fill_the_cache() -> None:
    cache, first = CacheManager(16, 4), make_state("a")
    compute(cache, first)
    asking = make_state("b", prompt_logprobs=0)
    compute(cache, asking)
    assert not set(first.blocks) & set(asking.blocks)
    longer = make_state("c", [*PROMPT, 7, 7, 7, 7], prompt_logprobs=1)
    compute(cache, longer)
    assert longer.block_keys[3] == cache.prefix.key_of(longer.blocks[3])
    longer.num_prompt_logprobs = 9
    cache.free(longer)
    assert cache.admit(longer, headroom=0)
    assert longer.num_computed == 8, "what is reported already may be a hit"
    cache.check([first, asking, longer])


def test_all_or_nothing() -> None:
    cache, first, second = CacheManager(4, 4), make_state("a"), make_state("b", [1] * 8)
    compute(cache, first)
    assert not cache.admit(second, headroom=0)
    assert not cache.append(first, 8)
    assert (second.blocks, len(first.blocks), cache.pool.num_free) == ([], 3, 1)
    cache.check([first, second])


def test_headroom_is_left_free() -> None:
    cache, state = CacheManager(4, 4), make_state("a")
    assert not cache.admit(state, headroom=2)
    assert cache.admit(state, headroom=1)


def test_forgotten_blocks_are_not_found() -> None:
    cache, first, second = CacheManager(8, 4), make_state("a"), make_state("b")
    compute(cache, first)
    compute(cache, second)
    cache.free(second, forget=True)
    assert cache.prefix.find(first.block_keys) == []
    cache.check([first])


def test_a_forgotten_prompt_is_not_found_held_or_not() -> None:
    for held in (True, False):
        cache, first, other = CacheManager(12, 4), make_state("a"), make_state("b", [5] * 9)
        compute(cache, first)
        compute(cache, other)
        cache.free(other)
        if not held:
            cache.free(first)
        cache.forget(block_keys(PROMPT, 4, "other salt"))
        assert cache.num_cached == (2 if held else 5)
        cache.forget(block_keys(PROMPT, 4, ""))
        assert cache.num_cached == 2
        cache.check([first] if held else [])
        again = make_state("c")
        assert cache.admit(again, headroom=0) and again.num_computed == 0
        if held:
            cache.free(first)
        cache.check([again])


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache, first, second = CacheManager(8, 4, prefix_caching=False), make_state("a"), make_state("b")
    compute(cache, first)
    compute(cache, second)
    assert len({*first.blocks, *second.blocks}) == 6
    cache.free(first)
    assert cache.num_cached == 0
    cache.check([second])


def test_check_sees_a_block_table_that_is_wrong() -> None:
    cache, state = CacheManager(8, 4), make_state("a")
    compute(cache, state)
    state.blocks.reverse()
    with pytest.raises(AssertionError):
        cache.check([state])
