"""Models of a real daemon: engines that are killed, memory that is short, and what an unload gives back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from homes import add_tiny, share_kernels
from test_daemon import Served, serve
from waiting import PATIENCE, until

MIB = 1 << 20
# Room for one of the two models: each takes 15 MiB of KV cache.
FLAGS = ("--kv-memory", "15MiB", "--max-memory", "24MiB", "--max-num-requests", "6", "--memory-wait", "0")
HI = [{"role": "user", "content": "hi"}]
LONG = {"stream": True}
SURFACES: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/chat/completions": ({"messages": HI, "max_tokens": 8000}, b'"code":"engine_died"'),
    "/v1/completions": ({"prompt": [40], "max_tokens": 8000}, b'"code":"engine_died"'),
    "/v1/messages": ({"messages": HI, "max_tokens": 8000}, b"event: error"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 8000}, b"response.failed"),
    "/api/chat": ({"messages": HI, "options": {"num_predict": 8000}}, b'{"error":"'),
    "/completion": ({"prompt": [40], "n_predict": 8000}, b'"error":{'),
}
QUEUED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [40], "max_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/v1/embeddings": {"input": [[40, 41], [42]]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one model under two names."""
    home = tmp_path_factory.mktemp("home")
    share_kernels(home)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return add_tiny(home, "tiny", "other", template=template, endless=True)


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    with serve(home, "tiny", *FLAGS) as daemon:
        yield daemon


def status_of(daemon: Served) -> dict[str, Any]:
    with daemon.http() as http:
        return http.get("/quantd/status").json()


def load(daemon: Served, model: str, **fields: Any) -> dict[str, Any]:
    """The last line of a load."""
    with daemon.http() as http:
        return json.loads(http.post("/quantd/load", json={"model": model} | fields).text.splitlines()[-1])


class Asked(threading.Thread):
    """A request in a thread of its own. reply: all that came."""

    def __init__(self, daemon: Served, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.path, self.daemon_, self.body = path, daemon, body
        self.status, self.reply = 0, b""
        self.start()

    def run(self) -> None:
        with self.daemon_.http() as http:
            response = http.post(self.path, json={"model": "tiny"} | self.body)
            self.status, self.reply = response.status_code, response.content


def unload_all(daemon: Served) -> None:
    for model in status_of(daemon)["models"]:
        assert daemon.post("/quantd/unload", {"model": model["name"]})[0] == 200


def kill_engine(daemon: Served) -> None:
    """Kill it, and wait until the daemon knows."""
    daemon.engine().kill()
    until(lambda: not status_of(daemon)["models"] or bool(status_of(daemon)["stopped"]), "it is missed")


def test_killed_engines(served: Served) -> None:
    """All that ran is told, on every surface; all that waited is served; the third death stops it."""
    # Nothing goes on meanwhile, so that nobody is done before all are there.
    served.engine().suspend()
    running = [Asked(served, path, body | LONG) for path, (body, _) in SURFACES.items()]
    until(lambda: len(status_of(served)["models"][0]["waiting"]) == 6, "all surfaces are asked")
    served.engine().resume()
    until(lambda: served.stats()["num_running"] == 6, "all surfaces are served")
    served.engine().suspend()
    queued = [Asked(served, path, body) for path, body in QUEUED.items()]
    until(lambda: len(status_of(served)["models"][0]["waiting"]) == 5, "the others wait")
    old = served.engine().pid
    served.engine().kill()
    for asked in running:
        asked.join(PATIENCE)
        assert SURFACES[asked.path][1] in asked.reply and b"SIGKILL" in asked.reply, asked.reply[-500:]
    for asked in queued:
        asked.join(PATIENCE)
        assert asked.status == 200, (asked.path, asked.reply)
    assert served.engine().pid != old
    kill_engine(served)
    served.complete({"model": "tiny", "prompt": [40], "max_tokens": 1})
    kill_engine(served)
    status, answer = served.post("/v1/completions", {"model": "tiny", "prompt": [40]})
    assert (status, answer["error"]["code"]) == (503, "engine_stopped")
    assert "SIGKILL" in answer["error"]["message"] and "quantd load tiny" in answer["error"]["message"]
    assert "SIGKILL" in status_of(served)["stopped"]["tiny"]
    assert load(served, "tiny")["status"] == "ready"
    assert status_of(served)["stopped"] == {}


def test_memory_is_made_for_another_model_unless_it_is_pinned(served: Served) -> None:
    first = served.engine().pid
    served.complete({"model": "other", "prompt": [40], "max_tokens": 1})
    assert [model["name"] for model in status_of(served)["models"]] == ["other"]
    assert served.engine().pid != first
    assert load(served, "other", pin=True)["status"] == "ready"
    status, answer = served.post("/v1/completions", {"model": "tiny", "prompt": [40]})
    assert (status, answer["error"]["code"]) == (503, "insufficient_memory")
    message = answer["error"]["message"]
    for part in ("was asked for", "\n  weights ", "\n  limit ", "\n  wanting ", "other (0.0 GB, pinned)"):
        assert part in message
    (model,) = status_of(served)["models"]
    assert model["pinned"] and model["unloads_in"] is None


def tree_memory(daemon: Served) -> int:
    """Bytes that the daemon and all its children alone hold."""
    process = psutil.Process(daemon.process.pid)
    return sum(each.memory_full_info().uss for each in (process, *process.children(recursive=True)))


def within_a_second(condition: Callable[[], bool]) -> bool:
    """Looked at every 20 ms; longer where the machine gives no time to look."""
    for _ in range(50):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_an_unload_gives_all_memory_back(served: Served) -> None:
    unload_all(served)
    before = tree_memory(served)
    served.complete({"model": "tiny", "prompt": [40] * 3000, "max_tokens": 50, "ignore_eos": True})
    engine = served.engine()
    assert tree_memory(served) > before + 100 * MIB
    assert served.post("/quantd/unload", {"model": "tiny"})[0] == 200
    assert within_a_second(lambda: not psutil.pid_exists(engine.pid))
    assert within_a_second(lambda: tree_memory(served) < before + 8 * MIB)


def quantd_plan(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "quantd.daemon.cli.main", "plan", *arguments]
    env = os.environ | {"QUANTD_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_the_plan_of_a_model_is_what_its_load_reports(home: Path, served: Served) -> None:
    unload_all(served)
    at = ("--socket", str(served.path), "--kv-memory", "15MiB", "--max-num-requests", "6")
    told = quantd_plan(home, "tiny", *at, "--json")
    assert told.returncode == 0, told.stderr
    plan = json.loads(told.stdout)
    info = load(served, "tiny")["info"]
    for name in ("weight_bytes", "kv_bytes", "kv_bytes_per_token", "num_blocks", "backend", "max_model_len"):
        assert plan[name] == info[name], name
    (device,) = plan["devices"]
    told_bytes = plan["weight_bytes"] + plan["kv_bytes"] + device["workspace"]
    assert served.engine().memory_full_info().uss < told_bytes
    short = quantd_plan(home, "other", *at)
    assert short.returncode == 1
    assert short.stdout.startswith(f"other on {info['backend']} does not fit: a KV cache of 15 MiB was asked")
