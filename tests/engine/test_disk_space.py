"""The room of blocks on disk: the bound, and who goes first."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantd.engine import disk_space
from quantd.engine.block_file import HEADER_BYTES
from quantd.engine.block_folder import PARTIAL, PINNED, About, BlockFolder
from quantd.engine.disk_space import MAX_AGE_SECONDS, DiskSpace

SIZE = 1000
FILE = SIZE + HEADER_BYTES


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def folder_of(root: Path, kind: int) -> BlockFolder:
    return BlockFolder(root, key(kind << 200), SIZE, About("/m", "int8", 4))


def fill(folder: BlockFolder, numbers: range, used: float) -> None:
    """The higher the number the later its use, in seconds from `used` on."""
    for number in numbers:
        folder.write(key(number), key(0), 1, bytes(SIZE))
        at = used + number
        os.utime(folder.path / key(number).hex(), (at, at))


def there(folder: BlockFolder) -> list[int]:
    return sorted(int(path.name, 16) for path in folder.path.iterdir() if len(path.name) == 64)


def total(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if len(path.name) == 64)


def test_the_bound_holds_over_all_kinds(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path, kind) for kind in (1, 2)]
    spaces = [DiskSpace(tmp_path, 40 * FILE) for _ in folders]
    for number in range(200):
        for folder, space in zip(folders, spaces, strict=True):
            assert space.make_room(FILE)
            folder.write(key(number), key(0), 1, bytes(SIZE))
        assert total(tmp_path) <= 40 * FILE
    assert total(tmp_path) > 30 * FILE
    for folder in folders:
        assert there(folder)[-1] == 199


def test_the_least_recently_used_go_and_pinned_ones_stay(tmp_path: Path) -> None:
    old, new = folder_of(tmp_path, 1), folder_of(tmp_path, 2)
    now = time.time()
    fill(old, range(10), now - 2000)
    fill(new, range(10), now - 1000)
    (old.path / key(0).hex()).chmod(PINNED)
    assert DiskSpace(tmp_path, 16 * FILE).make_room(FILE)
    assert there(old) == [0, 7, 8, 9]
    assert there(new) == list(range(10))


def test_where_all_is_pinned_there_is_no_room(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    fill(folder, range(8), time.time() - 100)
    for path in folder.path.iterdir():
        path.chmod(PINNED)
    space = DiskSpace(tmp_path, 8 * FILE)
    assert not space.make_room(FILE)
    assert there(folder) == list(range(8))


def test_a_block_larger_than_the_bound_has_no_room(tmp_path: Path) -> None:
    assert not DiskSpace(tmp_path, FILE - 1).make_room(FILE)


def test_what_was_not_used_for_long_goes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    fill(folder, range(4), 1000.0)
    space = DiskSpace(tmp_path, 100 * FILE, clock=lambda: 1001.5 + MAX_AGE_SECONDS)
    assert space.make_room(FILE)
    assert there(folder) == [2, 3]


def test_what_a_killed_process_left_goes_in_time(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1)
    old, new = folder.path / f"{PARTIAL}old", folder.path / f"{PARTIAL}new"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    DiskSpace(tmp_path, 100 * FILE).make_room(FILE)
    assert not old.exists() and new.exists()


def test_by_itself_it_takes_a_part_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, 1)
    fill(folder, range(20), time.time() - 100)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: SimpleNamespace(free=12 * FILE))
    assert DiskSpace(tmp_path, None).make_room(FILE)
    assert total(tmp_path) <= 8 * FILE
