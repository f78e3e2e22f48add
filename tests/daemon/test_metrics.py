"""The metrics page: each value against what clients did, also over the ends of engines."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from prometheus_client.parser import text_string_to_metric_families
from waiting import until_so

from quantd.daemon.activity import Peer, Progress, RequestRecord
from quantd.daemon.engine_totals import EngineTotals
from quantd.daemon.metrics import MOST_MODELS, Metrics
from quantd.engine.messages import Stats
from quantd.engine.request import Request, SamplingParams, TokenEvent

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

Samples = dict[tuple[str, ...], float]


def samples_of(page: str) -> Samples:
    """Values by name and labels, in the order of their names; buckets left out.

    As `promtool check metrics` does, refuses a name that comes twice, has no help, or a suffix that does not
    go with its type.
    """
    values: Samples = {}
    seen: set[str] = set()
    for family in text_string_to_metric_families(page):
        assert family.name not in seen and family.documentation, family.name
        seen.add(family.name)
        assert re.fullmatch(r"[a-z_:][a-z0-9_:]*", family.name)
        assert family.type in ("counter", "gauge", "histogram"), family.name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total") and sample.value >= 0, sample
            if "le" not in sample.labels:
                key = (sample.name, *sample.labels.values())
                assert key not in values, key
                values[key] = sample.value
    return values


async def scrape(daemon: Daemon) -> Samples:
    async with daemon.session.get("http://x/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return samples_of(await response.text())


@in_loop
async def test_values_are_those_that_clients_saw() -> None:
    async with running_daemon() as daemon:
        _, first = await daemon.post(CHAT, HI)
        _, second = await daemon.post(CHAT, HI | {"n": 2, "stop": "user"})
        _, embedded = await daemon.post("/v1/embeddings", {"model": "tiny", "input": ["a b", "c"]})
        daemon.engine.gate.clear()
        await daemon.leave(CHAT, HI)
        daemon.engine.gate.set()
        await daemon.post(CHAT, HI | {"messages": 5})
        await daemon.post("/nosuch", {})
        values = await scrape(daemon)
        for reason, count in (("length", 1), ("stop", 2 + 2), ("abort", 1)):
            assert values["quantd_request_success_total", reason, "tiny"] == count, reason
        generated = first["usage"]["completion_tokens"] + second["usage"]["completion_tokens"]
        assert values["quantd_generation_tokens_total", "tiny"] == generated
        prompts = first["usage"]["prompt_tokens"] + 2 * second["usage"]["prompt_tokens"]
        prompts += embedded["usage"]["prompt_tokens"]
        cached = first["usage"]["prompt_tokens_details"]["cached_tokens"]
        cached += 2 * second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert values["quantd_prompt_tokens_total", "tiny"] == prompts
        assert values["quantd_prefix_cache_queries_total", "tiny"] == prompts
        assert values["quantd_prefix_cache_hits_total", "tiny"] >= cached > 0
        for name, count in (
            ("time_to_first_token_seconds", 3),
            ("inter_token_latency_seconds", generated - 3),
            ("e2e_request_latency_seconds", 6),
            ("request_prompt_tokens", 6),
            ("request_generation_tokens", 6),
            ("request_decode_time_seconds", 3),
            ("request_time_per_output_token_seconds", 3),
        ):
            assert values[f"quantd_{name}_count", "tiny"] == count, name
        assert values["quantd_request_generation_tokens_sum", "tiny"] == generated
        assert values["quantd_http_requests_total", "/v1/chat/completions", "POST", "2xx"] == 2
        assert values["quantd_http_requests_total", "/v1/chat/completions", "POST", "4xx"] == 2
        assert values["quantd_http_requests_total", "other", "other", "4xx"] == 1
        assert values["quantd_num_requests_running", "tiny"] == 0
        assert values["quantd_kv_blocks_free", "tiny"] == 64
        assert values["quantd_kv_cache_usage_perc", "tiny"] == 0
        assert values["process_resident_memory_bytes",] > 1e6


@in_loop
async def test_gauges_are_of_the_moment() -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        asked = asyncio.create_task(daemon.post(CHAT, HI))
        await until_so(lambda: daemon.engine.running)
        values = await scrape(daemon)
        assert values["quantd_num_requests_running", "tiny"] == 1
        assert values["quantd_kv_cache_usage_perc", "tiny"] == 2 / 64
        daemon.engine.gate.set()
        await asked


@in_loop
async def test_counters_go_on_over_the_ends_of_engines() -> None:
    async with running_daemon() as daemon:
        await daemon.post(CHAT, HI)
        before = await scrape(daemon)
        daemon.engine.num_steps += 3
        await daemon.post("/quantd/unload", {"model": "tiny"})
        unloaded = await scrape(daemon)
        assert unloaded["quantd_engine_steps_total", "tiny"] == 3
        assert ("quantd_num_requests_running", "tiny") not in unloaded
        await daemon.post(CHAT, HI)
        daemon.engine.num_steps += 5
        reloaded = await scrape(daemon)
        daemon.engine.died.set_result("killed")
        await daemon.post(CHAT, HI)
        daemon.engine.num_steps += 1
        restarted = await scrape(daemon)
        assert restarted["quantd_engine_steps_total", "tiny"] == 3 + 5 + 1
        assert restarted["llamacpp:n_decode_total",] == 9
        assert restarted["quantd_generation_tokens_total", "tiny"] == 12
        pages = [before, unloaded, reloaded, restarted]
        for earlier, later in itertools.pairwise(pages):
            for key, value in earlier.items():
                if key[0].endswith(("_total", "_count")):
                    assert later[key] >= value, key


def test_totals_of_an_engine_that_was_never_asked_are_none() -> None:
    totals = EngineTotals()
    totals.end("m")
    assert totals.counts() == {}
    totals.note("m", Stats(steps=4, evictions=1))
    totals.note("m", Stats(steps=6, evictions=1))
    totals.end("m")
    totals.end("m")
    totals.note("m", Stats(steps=1))
    assert totals.counts()["m"]["steps"] == 7 and totals.counts()["m"]["evictions"] == 1


def test_times_and_buckets() -> None:
    metrics = Metrics()
    work = Progress(Request(id="a", prompt=[1] * 300, sampling=SamplingParams()), metrics.of("m"))
    work.started -= 1.0
    work.note(TokenEvent(request_id="a", token_ids=[1], num_cached=96, admitted=work.started + 0.3))
    work.latest -= 0.09
    work.first = work.latest
    work.note(TokenEvent(request_id="a", token_ids=[1, 2, 3]))
    work.end("length")
    page = metrics.render({}, {}).decode()
    values = samples_of(page)
    assert values["quantd_request_queue_time_seconds_sum", "m"] == pytest.approx(0.3)
    assert values["quantd_request_prefill_time_seconds_sum", "m"] == pytest.approx(0.61, abs=0.05)
    assert values["quantd_inter_token_latency_seconds_sum", "m"] == pytest.approx(0.09, abs=0.01)
    assert values["quantd_inter_token_latency_seconds_count", "m"] == 3
    assert 'quantd_inter_token_latency_seconds_bucket{le="0.02",model_name="m"} 0.0' in page
    assert 'quantd_inter_token_latency_seconds_bucket{le="0.04",model_name="m"} 3.0' in page
    assert 'quantd_request_prompt_tokens_bucket{le="256.0",model_name="m"} 0.0' in page
    assert 'quantd_request_prompt_tokens_bucket{le="512.0",model_name="m"} 1.0' in page


def test_labels_are_few_whatever_is_asked_for() -> None:
    metrics = Metrics()
    for number in range(2 * MOST_MODELS):
        metrics.of(f"m{number}")
        record = RequestRecord("r", Peer(), target=f"X{number} /path{number}")
        record.status = 404
        metrics.exchange(record)
    counts = {f"m{number}": Counter({"steps": 1}) for number in range(2 * MOST_MODELS)}
    values = samples_of(metrics.render({}, counts).decode())
    assert values["quantd_engine_steps_total", "other"] == MOST_MODELS
    models = {key[1] for key in values if key[0] == "quantd_prompt_tokens_total"}
    assert len(models) == MOST_MODELS + 1 and "other" in models
    assert [key for key in values if key[0] == "quantd_http_requests_total"] == [
        ("quantd_http_requests_total", "other", "other", "4xx")
    ]


def expressions(node: Any) -> list[str]:
    """All queries of a dashboard."""
    if isinstance(node, dict):
        found = [node["expr"]] if "expr" in node else []
        return found + [expr for value in node.values() for expr in expressions(value)]
    return [expr for value in node for expr in expressions(value)] if isinstance(node, list) else []


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((files("quantd.systemd") / "extras" / "grafana.json").read_text())
    metrics = Metrics()
    work = Progress(Request(id="a", prompt=[1], sampling=SamplingParams()), metrics.of("m"))
    work.end("stop")
    metrics.exchange(RequestRecord("r", Peer()))
    totals = EngineTotals()
    totals.note("m", Stats())
    page = metrics.render({"m": Stats()}, totals.counts()).decode()
    there = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    queries = expressions(dashboard)
    asked = {name for query in queries for name in re.findall(r"\b(?:quantd|process)_[a-z0-9_]+", query)}
    assert len(queries) > 12 and asked <= there, asked - there
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_bucket"):
        assert f"quantd_{name}" in asked
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
