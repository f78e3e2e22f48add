"""The log of requests: what stands in it, what never does, and that no disk stops the daemon."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from waiting import PATIENCE, until_so

from quantd.daemon.activity import CLIENT_LEFT, Peer, RequestRecord
from quantd.daemon.request_log import RequestLog

SECRET = "xyzzy"
HI = {"model": "tiny", "messages": [{"role": "user", "content": f"{SECRET} hi"}], "max_tokens": 4}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.asynccontextmanager
async def logging_daemon(path: Path, log_prompts: bool = False) -> AsyncIterator[Daemon]:
    async with running_daemon() as daemon:
        log = RequestLog(path)
        daemon.service.activity.on_end.append(log.add)
        daemon.service.activity.keeps_prompts = log_prompts
        yield daemon
        await daemon.settle()
        log.close()


@in_loop
async def test_a_line_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "requests.jsonl"
    async with logging_daemon(path) as daemon:
        headers = {"X-Request-ID": "mine", "User-Agent": "editor/1"}
        async with daemon.session.post("http://x/v1/chat/completions", json=HI, headers=headers) as answer:
            usage = (await answer.json())["usage"]
        await daemon.stream("/v1/chat/completions", HI | {"stream": True, "n": 2})
        await daemon.post("/v1/embeddings", {"model": "tiny", "input": ["a b", "c"]})
        await daemon.get("/quantd/status")
        await daemon.get("/v1/models")
        await daemon.get("/v1/models/nosuch")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    chat, stream, embedding, missing = lines_of(path)
    assert (chat["id"], chat["client"], chat["agent"]) == ("mine", f"uid:{os.getuid()}", "editor/1")
    assert chat["route"] == "POST /v1/chat/completions" and chat["model"] == "tiny"
    assert (chat["status"], chat["end"], chat["error"], chat["choices"]) == (200, "length", None, 1)
    assert (chat["prompt_tokens"], chat["output_tokens"]) == (usage["prompt_tokens"], 4)
    assert chat["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert 0 <= chat["load_seconds"] <= chat["first_token_seconds"] <= chat["total_seconds"] < 60
    assert chat["decode_seconds"] <= chat["total_seconds"]
    assert (stream["choices"], stream["output_tokens"]) == (2, 8)
    assert (embedding["choices"], embedding["output_tokens"], embedding["end"]) == (2, 0, "stop")
    assert (missing["route"], missing["status"], missing["end"]) == ("GET /v1/models/{id}", 404, "error")
    assert "nosuch" in missing["error"]


@in_loop
async def test_how_requests_end(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    async with logging_daemon(path) as daemon:
        await daemon.post("/v1/chat/completions", HI | {"model": "nosuch"})
        await daemon.post("/v1/completions", {"model": "tiny", "prompt": [5] * 600})
        await daemon.post("/nosuch", {})
        daemon.engine.gate.clear()
        await daemon.leave("/v1/chat/completions", HI)
        async with daemon.session.post("http://x/v1/chat/completions", json=HI | {"stream": True}) as left:
            daemon.engine.gate.set()
            await left.content.readline()
        await daemon.settle()
        daemon.engine.gate.clear()
        body = HI | {"stream": True}
        async with daemon.session.post("http://x/v1/chat/completions", json=body) as broken:
            await until_so(lambda: daemon.engine.running)
            daemon.engine.died.set_result("the engine is gone")
            await broken.read()
    ends = [(line["route"], line["status"], line["end"]) for line in lines_of(path)]
    chat = "POST /v1/chat/completions"
    assert ends[:4] == [
        (chat, 404, "error"),
        ("POST /v1/completions", 400, "error"),
        ("POST /nosuch", 404, "error"),
        (chat, CLIENT_LEFT, "abort"),
    ]
    assert ends[4][2] in ("abort", "length") and ends[5] == (chat, 200, "error")
    assert lines_of(path)[5]["error"] == "the engine is gone"


@in_loop
async def test_what_clients_choose_is_plain_text_there(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    wild = "m\x1b]0;title\x07\u202e\n\x9b2J" + "x" * 1000
    async with logging_daemon(path) as daemon:
        await daemon.post("/v1/chat/completions", HI | {"model": wild})
        await daemon.post(f"/no%1b%0a%ff%c2%9b{'x' * 900}", {})
        headers = {"User-Agent": "\udcff\u00e9\u009b"}
        await (await daemon.session.post("http://x/v1/chat/completions", json=HI, headers=headers)).read()
    entries = lines_of(path)
    assert len(entries) == 3 and "m]0;title" in entries[0]["model"]
    texts = [value for entry in entries for value in entry.values() if isinstance(value, str)]
    assert all(text.isprintable() and len(text) <= 300 for text in texts)


@in_loop
async def test_prompts_are_written_only_where_asked_for(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": SECRET, "parameters": {"not": {"const": SECRET}}}}
    bodies: list[tuple[str, object]] = [
        ("/v1/chat/completions", HI),
        ("/v1/chat/completions", HI | {"messages": HI["messages"] * 200}),
        ("/v1/chat/completions", HI | {"messages": [{"role": "user", "content": {"a": SECRET}}]}),
        ("/v1/chat/completions", HI | {"tools": [tool]}),
        ("/v1/completions", {"model": "tiny", "prompt": f"{SECRET} " * 300}),
        ("/v1/completions", {"model": "tiny", "prompt": [SECRET]}),
        ("/v1/completions", {"model": "tiny", "prompt": SECRET, "stop": SECRET}),
        ("/v1/embeddings", {"model": "tiny", "input": [SECRET, f"{SECRET} " * 300]}),
        ("/v1/embeddings", {"model": "tiny", "input": SECRET}),
        ("/v1/messages", HI | {"system": 5}),
        ("/api/chat", HI | {"format": "json"}),
        (
            "/api/generate",
            {"model": "tiny", "prompt": SECRET, "stream": False, "options": {"num_predict": 2}},
        ),
        ("/infill", {"input_prefix": SECRET, "input_suffix": ""}),
    ]
    quiet, full = tmp_path / "quiet", tmp_path / "full"
    for path, log_prompts in ((quiet, False), (full, True)):
        async with logging_daemon(path, log_prompts) as daemon:
            for route, body in bodies:
                async with daemon.session.post(f"http://x{route}", json=body) as answer:
                    await answer.read()
        assert len(lines_of(path)) == len(bodies)
    assert not [(line["route"], line["error"]) for line in lines_of(quiet) if SECRET in str(line)]
    assert all("prompts" not in line for line in lines_of(quiet))
    with_prompts = [line for line in lines_of(full) if "prompts" in line]
    assert len(with_prompts) >= 5 and all(SECRET in line["prompts"][0] for line in with_prompts)


def record(number: int) -> RequestRecord:
    made = RequestRecord(f"r{number}", Peer(), "POST /x", "POST /x")
    made.status = 200
    return made


def numbers(path: Path) -> list[int]:
    return [int(line["id"][1:]) for line in lines_of(path)]


def test_rotates_by_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(path, max_bytes=2000, num_old=2)
    for number in range(30):
        log.add(record(number))
    log.close()
    files = [tmp_path / name for name in ("log.2", "log.1", "log")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(file.stat().st_size <= 2000 for file in files)
    kept = [number for file in files for number in numbers(file)]
    assert kept == list(range(kept[0], 30)) and len(kept) > 8


WRITE = """
import sys
from pathlib import Path
from quantd.daemon.activity import Peer, RequestRecord
from quantd.daemon.request_log import RequestLog
log = RequestLog(Path(sys.argv[1]), max_bytes=8000, num_old=100)
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 100):
    log.add(RequestRecord(f"r{number}", Peer(), "POST /x", "POST /x"))
log.close()
"""


def test_daemons_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    commands = [[sys.executable, "-c", WRITE, str(path), str(first)] for first in (0, 100, 200)]
    for writer in [subprocess.Popen(command) for command in commands]:
        assert writer.wait(PATIENCE) == 0
    assert sorted(number for file in tmp_path.iterdir() for number in numbers(file)) == list(range(300))


def test_goes_on_where_the_file_was_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(path)
    log.add(record(1))
    log.close()
    log = RequestLog(path)
    path.unlink()
    log.add(record(2))
    log.close()
    assert numbers(path) == [2]


FILL = """
import logging, resource, signal, sys
from pathlib import Path
from quantd.daemon.activity import Peer, RequestRecord
from quantd.daemon.request_log import RequestLog
logging.basicConfig(level=logging.INFO)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
log = RequestLog(Path(sys.argv[1]))
for number in range(10):
    log.add(RequestRecord(f"r{number}", Peer(), "POST /x", "POST /x"))
log.close()
"""


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        # Files end at 1000 bytes there, as on a disk that is full.
        command = [sys.executable, "-c", FILL, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
        written = numbers(path)
        assert 0 < len(written) < 10 and written == sorted(set(written))
        assert "lines are left out: File too large" in done.stderr


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = RequestLog(tmp_path / "file" / "log")
    with caplog.at_level(logging.WARNING):
        log.add(record(1))
        log.close()
    assert "lines are left out: File exists" in caplog.text
