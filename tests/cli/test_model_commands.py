"""`quantd list` and `show` over a store in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from quantd.daemon.cli.models import list_command, show_command
from quantd.daemon.store import Store

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def home(tmp_path: Path, fixture_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a model that fills gaps, and one whose tokenizer is damaged."""
    monkeypatch.setenv("QUANTD_HOME", str(tmp_path))
    source = tmp_path / "source"
    shutil.copytree(fixture_folders["autogptq-4b-g32-sym"], source)
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    tokenizer.save(str(source / "tokenizer.json"))
    store = Store(tmp_path / "models")
    for name in ("coder", "damaged"):
        store.import_path(source, name)
    damaged = store.get("damaged").path / "tokenizer.json"
    damaged.unlink()
    damaged.write_text("{")
    return tmp_path


def test_what_models_can_do_is_told(home: Path) -> None:
    table = CliRunner().invoke(list_command).stdout
    can = table.splitlines()[0].index("CAN")
    assert [line[can:].split()[0] for line in table.splitlines()[1:]] == ["infill", "damaged"]
    listed = json.loads(CliRunner().invoke(list_command, ["--json"]).stdout)
    assert {model["name"]: model["capabilities"] for model in listed} == {
        "coder": ["infill"],
        "damaged": None,
    }
    assert "infill" in CliRunner().invoke(show_command, ["coder"]).stdout
    shown = json.loads(CliRunner().invoke(show_command, ["coder", "--json"]).stdout)
    assert shown["capabilities"] == ["infill"]
