"""`quantd bench` against a real daemon with a tiny model, and the arithmetic of its figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bench.sides.report import Row, interleave
from homes import share_kernels

from quantd.daemon.bench.loads import Load, make_prompts, standard_loads
from quantd.daemon.bench.results import Percentiles, Run, Timeline, percentiles, summarize, utilisation
from quantd.daemon.store import Store

DATA = Path(__file__).parents[1] / "data"
SMALL = (
    *("--clients", "2", "--prompt-len", "10", "--output-len", "12"),
    *("--prefill-len", "40", "--prefix-len", "50", "--repeats", "2"),
)


@pytest.fixture
def tiny(environment: dict[str, str], tmp_path: Path) -> str:
    """A model with random weights in the test's own store, and a daemon that keeps its cache small."""
    folder = tmp_path / "tiny"
    shutil.copytree(DATA / "fixtures" / "gptqmodel-4b-g32-v2", folder)
    for file in (DATA / "tokenizer").iterdir():
        shutil.copy(file, folder)
    home = Path(environment["QUANTD_HOME"])
    share_kernels(home)
    Store(home / "models").import_path(folder, "tiny")
    (home / "quantd.toml").write_text('[engine]\nkv_memory = "8MiB"\nthreads = 1\n')
    return "tiny"


def check_percentiles(found: dict[str, float]) -> None:
    assert 0 < found["p50"] <= found["p90"] <= found["p99"]


def check_result(result: dict[str, Any]) -> None:
    assert result["num_runs"] == 2
    assert all(result[name] > 0 for name in ("seconds", "prompt_rate", "output_rate"))
    check_percentiles(result["first_token"])
    assert (result["inter_token"] is None) == (result["load"]["output_len"] == 1)
    assert result["kv_utilisation"] is None or 0 < result["kv_utilisation"] <= 1


def test_bench_measures_each_load(quantd, tiny: str) -> None:
    done = quantd("bench", tiny, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["info"]["kv_dtype"]) == ("tiny", "int8")
    results = {result["load"]["kind"]: result for result in report["results"]}
    assert list(results) == ["decode", "prefill", "concurrency", "prefix-cold", "prefix-cached"]
    for result in results.values():
        check_result(result)
    # Blocks of 16: three of the 50 shared tokens are cached, for all but the first or for every client.
    cached = {kind: result["cached_tokens"] for kind, result in results.items()}
    assert cached == {
        "decode": 0,
        "prefill": 0,
        "concurrency": 0,
        "prefix-cold": 7 * 48,
        "prefix-cached": 8 * 48,
    }


def test_bench_prints_a_table_and_draws_a_plot(quantd, tiny: str, tmp_path: Path) -> None:
    plot = tmp_path / "bench.svg"
    done = quantd("bench", tiny, *SMALL, "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    for text in ("decode", "prefill", "concurrency", "prefix-cold", "prefix-cached", "50+10 > 12"):
        assert text in done.stdout
    assert "<svg" in plot.read_text()


def test_bench_refuses_before_it_measures(quantd, tiny: str, tmp_path: Path) -> None:
    for args, message in (
        (("--clients", "1,x"), "'1,x': give numbers from 1 to 256, such as 4,16"),
        (("--plot", "picture.txt"), "must end in .svg or .png"),
        (("--plot", "/nowhere/at/all.svg"), "there is no folder /nowhere/at"),
        (("--prefill-len", "100000"), "the load prefill has requests of 100001 tokens"),
    ):
        done = quantd("bench", tiny, *args)
        assert done.returncode != 0 and message in done.stderr
        assert "measuring" not in done.stderr
    code = "raise ImportError('matplotlib')"
    (tmp_path / "matplotlib.py").write_text(code)
    done = quantd("bench", tiny, "--plot", str(tmp_path / "x.svg"), PYTHONPATH=str(tmp_path))
    assert done.stderr == "Error: --plot needs matplotlib: pip install matplotlib\n"


def test_percentiles() -> None:
    assert percentiles([5.0]) == Percentiles(5.0, 5.0, 5.0)
    assert percentiles([float(value) for value in range(100, -1, -1)]) == Percentiles(50.0, 90.0, 99.0)
    assert percentiles([1.0, 2.0]) == Percentiles(1.5, pytest.approx(1.9), pytest.approx(1.99))


def test_utilisation_weighs_each_sample_by_its_size() -> None:
    assert utilisation([]) is None
    assert utilisation([(0, 0)]) is None
    assert utilisation([(8, 16), (48, 48), (0, 0)]) == pytest.approx(56 / 64)


def test_rates_of_a_run() -> None:
    """Two clients: 3 tokens at 2, 3 and 5 s, and 2 tokens at 4 and 8 s after the start."""
    first = Timeline(10.0, (12.0, 13.0, 15.0), 20, 3, 16)
    second = Timeline(10.5, (14.0, 18.0), 20, 2, 0)
    run = Run([first, second], [(30, 32)])
    assert (run.seconds, run.output_rate, run.prompt_rate, run.cached_tokens) == (8.0, 5 / 8, 40 / 4, 16)
    assert (first.first_token, first.gaps, first.decode_rate) == (2.0, [1.0, 2.0], 2 / 3)
    load = Load(kind="concurrency", prompt_len=20, output_len=3, num_clients=2)
    result = summarize(load, [run, Run([Timeline(0.0, (1.0,), 20, 1, 0)], [])])
    assert result.output_rate == (5 / 8 + 1) / 2
    assert result.decode_rate == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert result.inter_token == percentiles([1.0, 2.0, 4.0])
    assert result.kv_utilisation == 30 / 32


def test_a_load_of_one_token_has_no_decode_rate() -> None:
    load = Load(kind="prefill", prompt_len=20, output_len=1)
    result = summarize(load, [Run([Timeline(0.0, (1.0,), 20, 1, 0)], [])])
    assert (result.decode_rate, result.inter_token, result.kv_utilisation) == (None, None, None)


def test_prompts_share_what_the_load_says_and_nothing_else() -> None:
    load = Load(kind="prefix-cold", prompt_len=5, output_len=1, num_clients=3, shared_len=40)
    rng = Random(1)
    shared, prompts = make_prompts(load, 50_000, rng)
    assert [ids[:40] for ids in prompts] == [shared] * 3
    assert len({tuple(ids[40:]) for ids in prompts}) == 3 and {len(ids) for ids in prompts} == {45}
    assert make_prompts(load, 50_000, rng)[0] != shared
    assert make_prompts(load, 50_000, Random(1))[1] == prompts


def test_one_client_is_measured_once() -> None:
    loads = standard_loads([16, 1, 4, 4], 8, 8, 8, 8)
    assert [load.num_clients for load in loads if load.kind == "concurrency"] == [4, 16]
    assert [load.num_clients for load in loads if load.kind == "decode"] == [1]


def test_a_goal_is_of_the_ratio_where_there_is_a_peer() -> None:
    assert Row("decode", "tok/s", figure=200.0, goal=2.0, peer=100.0).met is True
    assert Row("decode", "tok/s", figure=199.0, goal=2.0, peer=100.0).met is False
    assert Row("load", "s", figure=2.9, goal=3.0, better="less").met is True
    assert Row("share", "%", figure=64.0, goal=65.0).met is False
    assert Row("decode", "tok/s", figure=1.0, goal=None, peer=2.0).met is None


def test_medians_of_interleaved_runs() -> None:
    order: list[str] = []
    values = {"a": iter([3.0, 1.0, 9.0]), "b": iter([5.0, 5.0, 4.0])}

    def run(name: str) -> float:
        order.append(name)
        return next(values[name])

    assert interleave(3, {"a": lambda: run("a"), "b": lambda: run("b")}) == {"a": 3.0, "b": 5.0}
    assert order == ["a", "b"] * 3
