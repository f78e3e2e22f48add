"""The daemon's own messages, as a journal and as people read them, and where it says that they go."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

CODE = """
import logging
import msgspec
from quantd.daemon.logs import log_to_stderr
place = log_to_stderr()
log = logging.getLogger("quantd")
log.debug("too much")
log.info("a model\\nis loaded")
log.warning("hm")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it broke")
print(msgspec.json.encode(place).decode())
"""


def said(stderr: int, **env: str) -> dict[str, object]:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=os.environ | env, check=True)
    place: dict[str, object] = json.loads(done.stdout)
    return place


def test_lines_for_a_journal_have_priorities() -> None:
    reader, writer = os.pipe()
    stream = os.fstat(writer)
    place = said(writer, JOURNAL_STREAM=f"{stream.st_dev}:{stream.st_ino}")
    os.close(writer)
    with os.fdopen(reader) as file:
        lines = file.read().splitlines()
    assert place["kind"] == "journal"
    assert lines[:3] == ["<6>a model", "<6>is loaded", "<4>hm"]
    assert lines[3] == "<3>it broke" and all(line.startswith("<3>") for line in lines[3:])
    assert lines[-1] == "<3>ZeroDivisionError: division by zero"


def test_lines_in_a_file_have_their_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        place = said(file.fileno(), JOURNAL_STREAM="1:2")
    assert place == {"kind": "file", "path": str(path)}
    first, *_ = path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO a model", first)


def test_what_nobody_keeps() -> None:
    assert said(subprocess.DEVNULL) == {"kind": "nowhere", "path": "/dev/null"}
