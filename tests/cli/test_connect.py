"""`quantd connect` as a command: which daemon and model it tells of, what it prints, what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon

from quantd.daemon.cli.endpoint import choose_model
from quantd.daemon.errors import ConfigError, ModelNotFoundError


@pytest.fixture
def home(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A user without any files, and a model on disk."""
    add_model(environment, "tiny", 2048)
    environment.pop("XDG_CONFIG_HOME", None)
    return environment | {"HOME": str(tmp_path / "user")}


def add_model(environment: dict[str, str], name: str, length: int) -> None:
    folder = Path(environment["QUANTD_HOME"]) / "models" / name
    folder.mkdir(parents=True)
    manifest = {"name": name, "source": "file:/x", "description": "", "architecture": "llama"}
    (folder / "quantd.json").write_text(json.dumps(manifest | {"bytes": 1, "created": 0.0}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": length}))
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')


def test_the_list_has_a_line_for_each(quantd) -> None:
    names = [line.split()[0] for line in quantd("connect").stdout.splitlines()[1:]]
    assert {"zed", "claude-code", "jetbrains"} <= set(names) and len(names) == 18
    listed = json.loads(quantd("connect", "--json").stdout)
    assert [tool["name"] for tool in listed] == names and all(tool["reads"] for tool in listed)


def test_without_a_daemon_the_configuration_counts(quantd, home: dict[str, str]) -> None:
    (Path(home["QUANTD_HOME"]) / "quantd.toml").write_text("port = 4321\n[engine]\nmax_model_len = 1024\n")
    told = json.loads(quantd("connect", "codex", "--json", HOME=home["HOME"]).stdout)
    assert (told["url"], told["model"], told["context"]) == ("http://127.0.0.1:4321", "tiny", 1024)
    assert told["files"][0]["path"] == f"{home['HOME']}/.codex/quantd.config.toml"
    assert told["written"] == []
    assert any("quantd serve" in note for note in told["notes"])
    assert any("10000 tokens" in note for note in told["notes"])


def test_a_running_daemon_counts_before_it(quantd, home: dict[str, str], fake_daemon: FakeDaemon) -> None:
    told = json.loads(
        quantd("connect", "codex", "--json", "--socket", str(fake_daemon.socket), HOME=home["HOME"]).stdout
    )
    assert (told["url"], told["model"], told["context"]) == ("http://127.0.0.1:11999", "tiny", 1600)


def test_the_key_is_this_users_or_one_that_is_given(quantd, home: dict[str, str]) -> None:
    for args, variables, key in [
        (("--key", "sk-1"), {}, "sk-1"),
        ((), {"QUANTD_KEY": "sk-2"}, "sk-2"),
        (("--key", "sk-1"), {"QUANTD_KEY": "sk-2"}, "sk-1"),
    ]:
        told = json.loads(quantd("connect", "tabby", *args, "--json", HOME=home["HOME"], **variables).stdout)
        assert f'api_key = "{key}"' in told["files"][0]["content"]
        assert all(f"Authorization: Bearer {key}" in line for line in told["tests"])
    done = quantd("connect", "zed", "--write", "--key", "sk-1", HOME=home["HOME"])
    assert "    OLLAMA_API_KEY=sk-1\n" in done.stdout


def test_write_and_undo(quantd, home: dict[str, str]) -> None:
    user = {"HOME": home["HOME"]}
    path = Path(home["HOME"]) / ".claude" / "settings.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"env": {"A": "1"}}')
    done = quantd("connect", "claude-code", "--write", **user)
    assert done.stdout.splitlines()[:2] == [
        f"{path}: written",
        f"  as it was: {path}.before-quantd-claude-code",
    ]
    env = json.loads(path.read_text())["env"]
    assert (env["A"], env["ANTHROPIC_MODEL"]) == ("1", "tiny")
    assert quantd("connect", "claude-code", "--write", **user).stdout.startswith(f"{path}: has it already\n")
    undone = json.loads(quantd("connect", "claude-code", "--undo", "--json", **user).stdout)
    assert undone["undone"] == [{"path": str(path), "done": "as it was", "backup": None, "kept": []}]
    assert path.read_text() == '{"env": {"A": "1"}}'


def test_what_is_printed_is_what_would_be_written(quantd, home: dict[str, str]) -> None:
    user = {"HOME": home["HOME"]}
    shown = quantd("connect", "opencode", **user).stdout
    quantd("connect", "opencode", "--write", **user)
    text = (Path(home["HOME"]) / ".config" / "opencode" / "opencode.json").read_text()
    assert "".join(f"    {line}\n" for line in text.splitlines()) in shown
    curl = shlex.split(shown.splitlines()[-1])
    assert curl[:2] == ["curl", "http://127.0.0.1:11435/v1/chat/completions"]
    assert json.loads(curl[-1])["model"] == "tiny"


def test_what_cannot_be_done_is_said_in_a_line(quantd, home: dict[str, str]) -> None:
    add_model(home, "big", 4096)
    config = Path(home["QUANTD_HOME"]) / "quantd.toml"
    for toml, args, message in [
        ("", ("zde",), "no program 'zde' is known here; did you mean zed?"),
        ("", ("zed",), "which model? Say --model with one of: big, tiny"),
        ("", ("zed", "--model", "gone"), "there is no model 'gone'; there are: big, tiny"),
        ('model = "big"\nport = "off"', ("zed",), "listens on no TCP port, which other programs need"),
        ('model = "big"\nport = 0', ("zed",), "the port is 0"),
        ("", ("zed", "--undo"), "nothing to undo"),
        ("", ("zed", "--model", "big", "--key", 'a"b'), "characters that no key has"),
        ("", ("jetbrains", "--model", "big", "--write"), "there is no file to write"),
        ("", ("zed", "--host", "127.0.0.1:1"), "No daemon answers"),
    ]:
        config.write_text(toml)
        done = quantd("connect", *args, HOME=home["HOME"])
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert quantd("connect", "zed", "--write", "--undo").returncode == 2
    assert quantd("connect", "zed", "--replace").returncode == 2


def test_the_model_that_is_told() -> None:
    known = ["a", "b", "c"]
    assert choose_model("b", known, ["a"], "c") == "b"
    assert choose_model(None, known, ["a"], "c") == "a"
    assert choose_model(None, known, ["a", "b"], "c") == "c"
    assert choose_model(None, known, [], "c") == "c"
    assert choose_model(None, ["a"], [], None) == "a"
    with pytest.raises(ConfigError, match="quantd pull smollm2"):
        choose_model(None, [], [], None)
    with pytest.raises(ConfigError, match="a, b, c"):
        choose_model(None, known, ["a", "b"], None)
    with pytest.raises(ModelNotFoundError):
        choose_model("d", known, [], None)
