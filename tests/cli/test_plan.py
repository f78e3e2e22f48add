"""`quantd plan` over plans that are made here: what it says, and its status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from quantd.daemon.cli import plan as command
from quantd.daemon.store import Store
from quantd.engine.config import EngineConfig
from quantd.engine.memory_plan import MemoryPlan, plan_memory
from quantd.engine.rank_messages import RankLoaded

DATA = Path(__file__).parents[1] / "data"
GB = 10**9


@pytest.fixture
def asked(tmp_path: Path, fixture_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs asked for, in a home with the model `tiny`, which is planned for as if it were larger."""
    monkeypatch.setenv("QUANTD_HOME", str(tmp_path))
    source = tmp_path / "source"
    shutil.copytree(fixture_folders["autogptq-4b-g32-sym"], source)
    shutil.copy(DATA / "tokenizer" / "tokenizer.json", source)
    Store(tmp_path / "models").import_path(source, "tiny")
    asked: list[EngineConfig] = []

    def ask(config: EngineConfig) -> MemoryPlan:
        asked.append(config)
        rank = RankLoaded(device="cpu", weight_bytes=GB, block_bytes=10**6, available=4 * GB)
        return plan_memory(config, "cpu avx2", config.max_model_len or 8192, [rank])

    monkeypatch.setattr(command, "ask_for_plan", ask)
    return asked


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(command.plan_command, ["tiny", *arguments], standalone_mode=False)


def test_what_fits_and_how_many_clients(asked: list[Any]) -> None:
    told = plan("--kv-memory", "1GB", "--kv-dtype", "fp16")
    assert told.return_value == 0 and told.stdout.splitlines() == [
        "tiny on cpu avx2:",
        "  weights            1.0 GB",
        "  KV a 1000 tokens   62.5 MB (fp16)",
        "  workspace          0 B",
        "  left to others     1.1 GB",
        "  free               5.0 GB on cpu",
        "  KV cache           16000 tokens (1.0 GB)",
        "  clients            1 of 8192 tokens: 512.0 MB, which fit; at most 1 do",
    ]
    assert (asked[0].kv_memory, asked[0].kv_dtype) == (GB, "fp16")


@pytest.mark.parametrize(("clients", "status", "words"), [(10, 0, "which fit"), (11, 1, "too many")])
def test_clients_that_are_wanted(asked: list[Any], clients: int, status: int, words: str) -> None:
    told = plan("--context", "1600", "--clients", str(clients), "--kv-memory", "1GB")
    assert told.return_value == status and asked[0].max_model_len == 1600
    assert f"{clients} of 1600 tokens: {clients / 10:.1f} GB, {words}; at most 10 do" in told.stdout


def test_what_does_not_fit(asked: list[Any]) -> None:
    told = plan("--context", "1000000")
    assert told.return_value == 1
    assert "tiny on cpu avx2 does not fit: one request of 1000000 tokens takes" in told.stdout
    assert "  wanting " in told.stdout and "clients" not in told.stdout
    fields = json.loads(plan("--context", "1000000", "--json").stdout)
    assert not fields["fits"] and fields["shortage"] > 0 and fields["kv_tokens"] == 0


def test_json_has_all_numbers(asked: list[Any]) -> None:
    fields = json.loads(plan("--kv-memory", "1GB", "--json").stdout)
    assert (fields["model"], fields["fits"], fields["kv_bytes_per_token"]) == ("tiny", True, 62500)
    assert fields["kv_tokens"] == 16000 and fields["devices"][0]["free"] == 5 * GB
    assert msgspec.convert(fields, MemoryPlan).num_blocks == 1000


def test_two_ways_to_say_one_thing_are_refused(asked: list[Any]) -> None:
    assert "one thing" in str(plan("--context", "9", "--max-model-len", "9").exception)
