"""Blocks as files: what is written comes back, and whatever else lies there does no harm."""

from __future__ import annotations

import logging
import os
import resource
import stat
import struct
from pathlib import Path

import pytest

from quantd.engine.block_file import HEADER_BYTES
from quantd.engine.block_folder import About, BlockFolder

ABOUT = About("/models/tiny", "int8", 4)
KIND, OTHER_KIND = bytes(range(32)), bytes(32)
KEY, OTHER_KEY, ROOT = b"k" * 32, b"o" * 32, b"r" * 32
DATA = bytes(range(256)) * 2


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    return BlockFolder(tmp_path / "prefixes", KIND, len(DATA), ABOUT)


def file_of(folder: BlockFolder, key: bytes = KEY) -> Path:
    return folder.path / key.hex()


def test_a_block_comes_back_for_its_owner_alone(folder: BlockFolder) -> None:
    assert (folder.count([KEY]), folder.read(KEY), folder.touch(KEY, 1)) == (0, None, False)
    umask = os.umask(0)
    try:
        folder.write(KEY, ROOT, 1, DATA)
        again = BlockFolder(folder.path.parent / "other", KIND, len(DATA), ABOUT)
    finally:
        os.umask(umask)
    assert bytes(folder.read(KEY) or b"") == DATA
    assert (folder.count([KEY, OTHER_KEY]), folder.touch(KEY, 1)) == (1, True)
    assert stat.S_IMODE(file_of(folder).stat().st_mode) == 0o600
    for path in (again.path, again.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.remove(KEY)
    folder.remove(KEY)
    assert folder.count([KEY]) == 0


def damaged(content: bytes) -> dict[str, bytes]:
    """What may have become of a file."""
    files = {f"byte {at}": flipped(content, at) for at in (*range(0, HEADER_BYTES, 5), len(content) - 1)}
    files |= {
        "empty": b"",
        "half a header": content[: HEADER_BYTES // 2],
        "only a header": content[:HEADER_BYTES],
    }
    files |= {"truncated": content[:-1], "longer": content + b"x", "zeros": bytes(len(content))}
    return files | {"another version": content[:8] + struct.pack("<I", 2) + content[12:]}


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_a_damaged_file_is_dropped_with_a_line(folder: BlockFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.write(KEY, ROOT, 1, DATA)
    content = file_of(folder).read_bytes()
    for name, bad in damaged(content).items():
        file_of(folder).write_bytes(bad)
        caplog.clear()
        assert folder.read(KEY) is None, name
        assert not file_of(folder).exists(), name
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and KEY.hex() in record.getMessage(), name
        assert folder.read(KEY) is None and len(caplog.records) == 1


def test_files_of_another_size_are_no_hits(folder: BlockFolder, caplog: pytest.LogCaptureFixture) -> None:
    for size in (0, 10, HEADER_BYTES + len(DATA) - 1):
        file_of(folder).write_bytes(bytes(size))
        assert folder.count([KEY]) == 0 and not file_of(folder).exists()
    assert len(caplog.records) == 3


def test_what_belongs_to_others_is_dropped(folder: BlockFolder, caplog: pytest.LogCaptureFixture) -> None:
    foreign = BlockFolder(folder.path.parent, OTHER_KIND, len(DATA), ABOUT)
    foreign.write(KEY, ROOT, 1, DATA)
    file_of(foreign).rename(file_of(folder))
    assert folder.read(KEY) is None and "another model" in caplog.text
    folder.write(OTHER_KEY, ROOT, 1, DATA)
    file_of(folder, OTHER_KEY).rename(file_of(folder))
    assert folder.read(KEY) is None and "another block" in caplog.text


def test_what_is_no_file_is_passed_over(folder: BlockFolder) -> None:
    os.mkfifo(file_of(folder))
    file_of(folder, OTHER_KEY).mkdir()
    elsewhere = folder.path / "elsewhere"
    folder.write(ROOT, ROOT, 1, DATA)
    file_of(folder, ROOT).rename(elsewhere)
    file_of(folder, ROOT).symlink_to(elsewhere)
    for key in (KEY, OTHER_KEY, ROOT):
        assert (folder.count([key]), folder.touch(key, 1)) == (0, False)
    assert elsewhere.exists()


def test_a_full_disk_leaves_nothing_behind(folder: BlockFolder) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.write(KEY, ROOT, 1, DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in folder.path.iterdir()] == ["about.json"]


def test_a_use_is_noted_at_most_once_a_minute(folder: BlockFolder) -> None:
    folder.write(KEY, ROOT, 3, DATA)
    for age, noted in ((30, False), (90, True), (-90, True)):
        before = file_of(folder).stat().st_mtime_ns
        used = before - age * 10**9
        os.utime(file_of(folder), ns=(used, used))
        assert folder.touch(KEY, 3)
        assert (file_of(folder).stat().st_mtime_ns != used) == noted


def test_the_deep_end_is_older_than_what_comes_before_it(folder: BlockFolder) -> None:
    for depth in range(1, 5):
        folder.write(bytes([depth]) * 32, ROOT, depth, DATA)
        folder.touch(bytes([depth]) * 32, depth)
    now = 10**15
    for depth in range(1, 5):
        path = file_of(folder, bytes([depth]) * 32)
        os.utime(path, ns=(now, now))
        assert folder.touch(bytes([depth]) * 32, depth)
    times = [file_of(folder, bytes([depth]) * 32).stat().st_mtime_ns for depth in range(1, 5)]
    assert max(times) - min(times) < 10**9
