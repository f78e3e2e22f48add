"""A real daemon as its users see it: its log of requests, its metrics over a crash, top, logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_daemon import STORY, Served, serve, tiny_home
from waiting import PATIENCE, until

__all__ = ["tiny_home"]

SECRET = "xyzzy"
ASK = {"model": "tiny", "prompt": f"{SECRET} " * 100, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tiny_home: Path) -> Iterator[Served]:
    with serve(tiny_home, "tiny", "--kv-memory", "32MiB", "--max-num-tokens", "64") as daemon:
        yield daemon


def quantd(served: Served, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "quantd.daemon.cli.main", *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"QUANTD_HOME": str(home), "QUANTD_SOCKET": str(served.path)},
    )


def values(served: Served) -> dict[str, float]:
    with served.http() as http:
        page = http.get("/metrics").text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("model_name") == "tiny" and "le" not in sample.labels
        if sample.labels.get("finished_reason", "length") == "length"
    }


def entries(home: Path) -> list[dict[str, Any]]:
    file = home / "state" / "requests.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_stream_is_cancelled_from_the_command_line(served: Served, tiny_home: Path) -> None:
    body = ASK | {"prompt": [5] * 20, "max_tokens": 7000, "stream": True}
    headers = {"x-request-id": "long-story"}
    with served.http() as http, http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        assert "long-story" in quantd(served, tiny_home, "cancel").stdout
        assert quantd(served, tiny_home, "cancel", "long").stdout == "Cancelled: long-story\n"
        last = [line for line in lines if line.startswith("data:")][-1]
    assert "the request was cancelled" in json.loads(last.removeprefix("data:"))["error"]["message"]
    served.wait_idle()
    assert quantd(served, tiny_home, "cancel").stdout == "No request is under way.\n"


def test_a_request_in_log_and_metrics(served: Served, tiny_home: Path) -> None:
    before = values(served)
    with served.http() as http:
        first = http.post("/v1/completions", json=ASK, headers={"x-request-id": "first"})
        again = http.post("/v1/completions", json=ASK)
    assert first.headers["x-request-id"] == "first"
    usages = [answer.json()["usage"] for answer in (first, again)]
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    after = values(served)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert grown["quantd_prompt_tokens_total"] == grown["quantd_prefix_cache_queries_total"] == prompts
    assert grown["quantd_prefix_cache_hits_total"] == cached
    assert (
        grown["quantd_generation_tokens_total"] == 40 == grown["quantd_inter_token_latency_seconds_count"] + 2
    )
    assert grown["quantd_request_success_total"] == 2
    assert grown["quantd_computed_tokens_total"] == prompts - cached + 38
    for name in ("queue_time", "prefill_time", "decode_time"):
        assert grown[f"quantd_request_{name}_seconds_count"] == 2
        assert grown[f"quantd_request_{name}_seconds_sum"] > 0
    until(lambda: len(entries(tiny_home)) >= 3, "the log has them")
    mine = [entry for entry in entries(tiny_home) if entry["id"] in ("first", again.headers["x-request-id"])]
    assert [entry["cached_tokens"] for entry in mine] == [0, cached]
    for entry in mine:
        times = [entry[f"{name}_seconds"] for name in ("queue", "prefill", "decode")]
        assert all(seconds > 0 for seconds in times) and sum(times) <= entry["total_seconds"]
        assert entry["queue_seconds"] + entry["prefill_seconds"] <= entry["first_token_seconds"]


def test_counters_outlive_a_crash_and_what_was_said_is_in_no_log(served: Served, tiny_home: Path) -> None:
    served.complete(ASK)
    before = values(served)
    served.engine().kill()
    served.complete(ASK)
    after = values(served)
    for name, value in before.items():
        if name.endswith(("_total", "_count", "_sum")):
            assert after[name] >= value, name
    assert after["quantd_engine_steps_total"] >= before["quantd_engine_steps_total"] + 20
    said = quantd(served, tiny_home, "logs", "-n", "1000")
    assert said.returncode == 0 and "ended by SIGKILL" in said.stdout
    told = quantd(served, tiny_home, "logs", "--requests", "--json")
    assert len(told.stdout.splitlines()) >= 4
    assert SECRET not in said.stdout + told.stdout + served.said()


def test_what_runs(served: Served, tiny_home: Path) -> None:
    body = ASK | {"prompt": [5] * 20, "max_tokens": 7000, "stream": True}
    with served.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        next(lines)
        shown = quantd(served, tiny_home, "top", "--once")
        assert shown.returncode == 0, shown.stderr
        assert "1 running, 0 waiting" in shown.stdout and "decode" in shown.stdout
        told = json.loads(quantd(served, tiny_home, "top", "--once", "--json").stdout)
        (request,) = told["requests"]
        assert request["phase"] == "decode" and request["tokens_per_second"] > 0
        (model,) = told["models"]
        stats, pool = model["stats"], model["pool"]
        assert sum(pool["cached"]) == stats["blocks_cached"]
        assert sum(pool["held"]) == stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"] > 0
        assert model["memory_bytes"] > 10_000_000 < told["memory"]["daemon_bytes"]


def test_a_client_that_leaves_is_an_abort(served: Served, tiny_home: Path) -> None:
    num_before = len(entries(tiny_home))
    body = {"model": "tiny", "messages": STORY, "max_tokens": 8000, "ignore_eos": True}
    with served.send(body):
        until(lambda: served.stats()["num_running"] == 1, "the request runs")
    until(lambda: len(entries(tiny_home)) > num_before, "it is logged")
    assert entries(tiny_home)[-1]["end"] == "abort" and entries(tiny_home)[-1]["status"] == 499
