"""The prefixes on disk as a tree of lines, and the routes over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon

from quantd.daemon.errors import PrefixNotFoundError
from quantd.daemon.stored_prefixes import StoredPrefix, StoredPrefixes
from quantd.engine.block_file import HEADER_BYTES
from quantd.engine.block_folder import About, BlockFolder
from quantd.engine.disk_space import DiskSpace
from quantd.engine.prefix_cache import block_keys, root_key

SIZE = 100
FILE = SIZE + HEADER_BYTES
SYSTEM, CHAT, CODE = [1] * 12, [2] * 8, [3] * 4


def folder_of(root: Path, kind: int, model: str) -> BlockFolder:
    return BlockFolder(root, bytes([kind]) * 32, SIZE, About(f"/models/{model}", "int8", 4))


def store(folder: BlockFolder, prompt: Sequence[int], used: float, salt: str = "") -> None:
    keys = block_keys(prompt, 4, salt)
    for index, key in enumerate(keys):
        if folder.count([key]):
            continue
        folder.write(key, keys[index - 1] if index else root_key(salt), index + 1, bytes(SIZE))
        os.utime(folder.path / key.hex(), (used, used))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two chats and a program under one system prompt, and another model."""
    folder = folder_of(tmp_path, 1, "org--tiny@v2")
    store(folder, SYSTEM + CHAT, 1000.0)
    store(folder, SYSTEM + CODE, 2000.0)
    store(folder_of(tmp_path, 2, "other"), SYSTEM + CHAT, 500.0)
    return tmp_path


def by_tokens(
    prefixes: Sequence[StoredPrefix], model: str = "org/tiny:v2"
) -> dict[tuple[int, int], StoredPrefix]:
    """By tokens and size: what tells the lines of these tests apart."""
    return {(prefix.tokens, prefix.bytes // FILE): prefix for prefix in prefixes if prefix.model == model}


def test_lines_are_what_lies_between_branches(root: Path) -> None:
    assert StoredPrefixes(root / "nothing here").all() == []
    prefixes = StoredPrefixes(root).all()
    lines = by_tokens(prefixes)
    assert lines.keys() == {(12, 3), (20, 2), (16, 1)}
    system, chat, code = lines[12, 3], lines[20, 2], lines[16, 1]
    assert (system.under, chat.under, code.under) == (None, system.id, system.id)
    assert (system.used, chat.used, code.used) == (1000.0, 1000.0, 2000.0)
    assert not system.pinned and system.kv_dtype == "int8"
    assert [prefix.id for prefix in prefixes if prefix.model != "other"] == [system.id, code.id, chat.id]
    assert len({prefix.id for prefix in prefixes}) == len(prefixes)
    assert sum(prefix.bytes for prefix in prefixes) == sum(
        path.stat().st_size for path in root.rglob("*") if len(path.name) == 64
    )


def test_removing_takes_what_goes_on_from_it_along(root: Path) -> None:
    stored = StoredPrefixes(root)
    lines = by_tokens(stored.all())
    removed = stored.remove([lines[16, 1].id])
    assert (removed.prefixes, removed.num_bytes, len(removed.keys)) == (1, FILE, 1)
    assert by_tokens(stored.all()).keys() == {(20, 5)}
    with pytest.raises(PrefixNotFoundError, match="quantd cache ls"):
        stored.remove([lines[16, 1].id])
    store(folder_of(root, 1, "org--tiny@v2"), SYSTEM + CODE, 2000.0)
    assert stored.remove([by_tokens(stored.all())[12, 3].id[:9].upper()]).prefixes == 3
    assert by_tokens(stored.all()) == {}
    assert len(stored.all()) == 1


def test_removing_a_model_or_all(root: Path) -> None:
    stored = StoredPrefixes(root)
    with pytest.raises(PrefixNotFoundError, match="nosuch"):
        stored.remove(model="nosuch")
    stored.clear("nosuch")
    assert stored.remove(model="other:latest").num_bytes == 5 * FILE
    stored.pin([prefix.id for prefix in stored.all()])
    assert stored.remove(everything=True).prefixes == 3
    assert not [path for path in root.rglob("*") if len(path.name) == 64]
    assert stored.remove(everything=True).prefixes == 0


def test_pinned_prefixes_outlive_the_others(root: Path) -> None:
    stored = StoredPrefixes(root)
    lines = by_tokens(stored.all())
    (pinned,) = stored.pin([lines[20, 2].id])
    assert (pinned.id, pinned.pinned) == (lines[20, 2].id, True)
    assert [prefix.pinned for prefix in by_tokens(stored.all()).values()].count(
        True
    ) == 2  # and the system prompt
    DiskSpace(root, 6 * FILE, clock=lambda: 3000.0).make_room(FILE)
    assert by_tokens(stored.all()).keys() == {(20, 5)}
    assert by_tokens(stored.all(), "other") == {}
    (line,) = stored.all()
    stored.pin([line.id], pinned=False)
    assert not stored.all()[0].pinned
    DiskSpace(root, FILE, clock=lambda: 3000.0).make_room(FILE)
    assert stored.all() == []


def test_letting_go_of_a_pin_lets_go_of_what_goes_on_from_it(root: Path) -> None:
    stored = StoredPrefixes(root)
    lines = by_tokens(stored.all())
    stored.pin([lines[20, 2].id, lines[16, 1].id])
    stored.pin([lines[16, 1].id], pinned=False)
    assert {key: line.pinned for key, line in by_tokens(stored.all()).items()} == {
        (12, 3): True,
        (20, 2): True,
        (16, 1): False,
    }
    stored.pin([lines[12, 3].id], pinned=False)
    assert not any(prefix.pinned for prefix in stored.all())


def test_what_is_no_block_is_passed_over(root: Path) -> None:
    folder = folder_of(root, 2, "other").path
    (folder / ("0" * 64)).write_bytes(b"x")
    (folder / ("1" * 64)).mkdir()
    os.mkfifo(folder / ("2" * 64))
    (folder / "about.json").write_bytes(b"not JSON")
    (root / "notes.txt").write_text("mine")
    assert len(StoredPrefixes(root).all()) == 4
    StoredPrefixes(root).remove(everything=True)
    assert (root / "notes.txt").exists()


async def lines_of(daemon: Daemon) -> dict[tuple[int, int], StoredPrefix]:
    status, answer = await daemon.get("/quantd/cache")
    assert status == 200
    return by_tokens([StoredPrefix(**prefix) for prefix in answer["prefixes"]], "tiny")


@in_loop
async def test_routes() -> None:
    async with running_daemon() as daemon:
        assert await daemon.get("/quantd/cache") == (200, {"prefixes": []})
        folder = folder_of(daemon.path.parent / "prefixes", 1, "tiny")
        store(folder, SYSTEM + CHAT, 1000.0)
        store(folder, SYSTEM + CODE, 2000.0)
        await daemon.post("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 1})
        lines = await lines_of(daemon)
        code, chat = lines[16, 1], lines[20, 2]
        status, answer = await daemon.post("/quantd/cache/pin", {"ids": [chat.id]})
        assert status == 200 and [prefix["pinned"] for prefix in answer["prefixes"]] == [True]
        status, answer = await daemon.post("/quantd/cache/rm", {"ids": [code.id]})
        assert (status, answer) == (200, {"prefixes": 1, "bytes": FILE})
        assert daemon.engine.dropped == [block_keys(SYSTEM + CODE, 4, "")[3:]]
        for path in ("rm", "pin"):
            status, answer = await daemon.post(f"/quantd/cache/{path}", {"ids": ["feed"]})
            assert status == 404 and "feed" in answer["error"]["message"]
        status, answer = await daemon.post("/quantd/cache/rm", {"all": True})
        assert status == 200 and answer["bytes"] == 5 * FILE
        assert daemon.engine.dropped[1] is None
        assert await daemon.get("/quantd/cache") == (200, {"prefixes": []})
        assert await daemon.post("/quantd/cache/rm", {}) == (200, {"prefixes": 0, "bytes": 0})
        store(folder, SYSTEM, 1000.0)
        async with daemon.session.delete("http://x/api/delete", json={"model": "tiny"}) as response:
            assert response.status == 200, await response.text()
        assert await daemon.get("/quantd/cache") == (200, {"prefixes": []})
