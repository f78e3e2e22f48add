import pytest

from quantd.engine.prefix_cache import PrefixCache, block_key, root_key


def test_a_key_depends_on_salt_parent_and_every_id_at_full_width() -> None:
    root = root_key("")
    keys = [
        block_key(root, [1, 2]),
        block_key(root, [2, 1]),
        block_key(root, [1, 2 + 2**16]),
        block_key(root, [1, 2 + 2**32]),
        block_key(root, [1, 2, 0]),
        block_key(root_key("other client"), [1, 2]),
        block_key(block_key(root, [0, 0]), [1, 2]),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) >= 16 for key in keys)


def test_a_key_is_the_same_in_every_process() -> None:
    assert block_key(root_key("a"), [1, 2]).hex().startswith("b43e27aba3e0519b")


def test_find_stops_at_the_first_unknown_key() -> None:
    cache, keys = PrefixCache(), [bytes([n]) for n in range(4)]
    for block, key in ((7, keys[0]), (3, keys[1]), (5, keys[3])):
        cache.insert(key, block)
    assert cache.find(keys) == [7, 3]
    assert cache.find(keys[2:]) == []


def test_of_equal_contents_the_first_block_is_found() -> None:
    cache = PrefixCache()
    cache.insert(b"key", 1)
    cache.insert(b"key", 2)
    assert cache.find([b"key"]) == [1]
    assert list(cache) == [1]
    assert not cache.evict(2)
    assert cache.evict(1)
    assert cache.find([b"key"]) == []
    cache.check()


def test_a_block_holds_one_prefix() -> None:
    cache = PrefixCache()
    cache.insert(b"key", 1)
    with pytest.raises(AssertionError, match="block 1"):
        cache.insert(b"other", 1)
