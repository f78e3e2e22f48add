"""A prefix outlives an unload and the daemon: real processes, told by the usage that clients see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from homes import add_tiny, share_kernels
from test_daemon import Served, serve
from waiting import PATIENCE, until

PROMPT = [20 + number * number % 97 for number in range(180)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    share_kernels(home)
    return add_tiny(home, "tiny")


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    with start(home) as daemon:
        yield daemon


def start(home: Path) -> Any:
    return serve(home, "tiny", "--kv-memory", "8MiB")


def ask(daemon: Served, salt: str = "", prompt: list[int] = PROMPT) -> tuple[int, str]:
    """How many tokens of the prompt were cached, and the answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "cache_salt": salt}
    reply = daemon.complete(body)
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["text"]


def quantd(daemon: Served, home: Path, *args: str) -> Any:
    command = [sys.executable, "-P", "-m", "quantd.daemon.cli.main", "cache", *args, "--json"]
    environment = os.environ | {"QUANTD_HOME": str(home)}
    done = subprocess.run(
        [*command, "--socket", str(daemon.path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(home: Path) -> list[Path]:
    return [path for path in (home / "cache" / "prefixes").rglob("*") if len(path.name) == 64]


def test_a_prefix_outlives_unload_restart_and_kill(home: Path) -> None:
    with start(home) as daemon:
        cold = ask(daemon)
        assert cold[0] == 0
        assert ask(daemon, "other")[0] == 0
        # The digest of the weights, which all need, is made while idle too.
        until(lambda: len(files(home)) >= 2 * 11, "written while idle")
        assert daemon.post("/quantd/unload", {"model": "tiny"})[0] == 200
        assert ask(daemon) == (176, cold[1])
        assert daemon.stats()["disk_hits"] == 176
        ask(daemon, "last words")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE) == 0
    for path in files(home):
        assert path.stat().st_mode & 0o777 == 0o600
    with start(home) as daemon:
        assert ask(daemon, "last words") == (176, cold[1])
        assert ask(daemon) == (176, cold[1])
        assert ask(daemon, "nobody's")[0] == 0
        ask(daemon, "idle")
        until(lambda: len(files(home)) >= 5 * 11, "written while idle")
        daemon.engine().kill()
        daemon.process.kill()
        daemon.process.wait()
    with start(home) as daemon:
        assert ask(daemon, "idle") == (176, cold[1])


def test_prefixes_are_listed_pinned_and_removed(home: Path, served: Served) -> None:
    ask(served, "pinned")
    ask(served, "removed")
    assert served.post("/quantd/unload", {"model": "tiny"})[0] == 200
    prefixes = quantd(served, home, "ls")
    assert {prefix["model"] for prefix in prefixes} == {"tiny"}
    assert {prefix["tokens"] for prefix in prefixes} == {176}
    first = prefixes[0]["id"]
    assert quantd(served, home, "pin", first)[0]["pinned"]
    assert ask(served, "removed")[0] == 176
    removed = quantd(served, home, "rm", "--all")
    assert removed["prefixes"] == len(prefixes)
    assert not files(home)
    # Neither from memory.
    assert ask(served, "removed")[0] == 0
    assert ask(served, "pinned")[0] == 0


def test_an_erased_slot_is_gone_from_the_disk_too(home: Path, served: Served) -> None:
    body = {"prompt": PROMPT, "n_predict": 1, "id_slot": 3}

    def cached() -> int:
        status, reply = served.post("/completion", body)
        assert status == 200, reply
        return int(reply["tokens_cached"])

    quantd(served, home, "rm", "--all")
    cached()
    until(lambda: len(files(home)) == 11, "written while idle")
    assert cached() == 176
    assert served.post("/slots/3?action=erase", {})[0] == 200
    assert cached() == 0
    assert served.post("/completion", body | {"cache_prompt": False})[1]["tokens_cached"] == 0
    assert served.post("/quantd/unload", {"model": "tiny"})[0] == 200
    assert len(files(home)) == 11


def test_two_daemons_share_what_is_on_disk(home: Path, served: Served) -> None:
    with start(home) as other:
        prompts = [[*PROMPT, *range(30, 30 + number)] for number in range(4)]
        answers = [[ask(daemon, "both", prompt)[1] for prompt in prompts] for daemon in (served, other)]
        assert answers[0] == answers[1]
        assert served.post("/quantd/unload", {"model": "tiny"})[0] == 200
        assert [ask(served, "both", prompt) for prompt in prompts] == [(176, text) for text in answers[1]]
    assert not list((home / "cache" / "prefixes").rglob(".partial-*"))
