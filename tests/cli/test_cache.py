"""`quantd cache` without a daemon: the user's own folder."""

from __future__ import annotations

import json
from pathlib import Path

from quantd.engine.block_folder import About, BlockFolder
from quantd.engine.prefix_cache import block_keys, root_key


def test_what_is_on_disk_is_listed_pinned_and_removed(quantd, environment: dict[str, str]) -> None:
    assert json.loads(quantd("cache", "ls", "--json").stdout) == []
    root = Path(environment["QUANTD_HOME"]) / "cache" / "prefixes"
    folder = BlockFolder(root, bytes(32), 1000, About("/models/tiny", "int8", 16))
    keys = block_keys(range(64), 16, "")
    for index, key in enumerate(keys):
        folder.write(key, keys[index - 1] if index else root_key(""), index + 1, bytes(1000))
    (prefix,) = json.loads(quantd("cache", "ls", "--json").stdout)
    assert (prefix["model"], prefix["tokens"], prefix["pinned"]) == ("tiny", 64, False)
    assert quantd("cache", "pin", prefix["id"]).stdout == f"Pinned: {prefix['id']}\n"
    header, row = quantd("cache", "ls").stdout.splitlines()
    assert header.split()[:4] == ["ID", "MODEL", "KV", "TOKENS"] and row.split()[:4] == [
        prefix["id"],
        "tiny",
        "int8",
        "64",
    ]
    assert "yes" in row
    assert quantd("cache", "pin", "--off", prefix["id"]).returncode == 0
    assert quantd("cache", "rm", prefix["id"]).stdout.startswith("Removed 1 prefix, 4.")
    assert json.loads(quantd("cache", "ls", "--json").stdout) == []
    assert not [path for path in folder.path.iterdir() if len(path.name) == 64]


def test_errors_are_a_line(quantd) -> None:
    missing = quantd("cache", "rm", "feed")
    assert missing.returncode == 1
    assert missing.stderr == "Error: no prefix 'feed' is on disk: quantd cache ls shows those there are\n"
    nothing = quantd("cache", "rm")
    assert nothing.returncode == 2 and "--all" in nothing.stderr
    assert quantd("cache", "ls", "--socket", "/nowhere").returncode == 1
