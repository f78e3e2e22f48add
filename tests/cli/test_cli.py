"""The real `quantd` command as a subprocess, against a stand-in daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_daemon import INFO, STATUS, FakeDaemon
from homes import share_kernels
from waiting import PATIENCE

from quantd.daemon.cli.client import parse_host
from quantd.daemon.errors import ConfigError

CLIENT_COMMANDS = ("run", "pull", "import", "list", "show", "rm", "load", "unload", "ps", "status", "stop")


def test_help_names_every_command(quantd) -> None:
    text = quantd("--help").stdout
    for name in (*CLIENT_COMMANDS, "connect", "serve", "doctor"):
        assert f"\n  {name} " in text
    assert quantd("--version").stdout == "quantd 0.1.0\n"


def test_no_client_command_imports_what_is_slow(environment: dict[str, str]) -> None:
    """All modules of the command line at once, and one command that talks to a daemon (there is none)."""
    code = (
        "import sys; from quantd.daemon.cli import main\n"
        "sys.argv = ['quantd', '--help']; main.main()\n"
        "sys.argv = ['quantd', 'ps']; assert main.main() == 1\n"
        "slow = {'torch', 'transformers', 'aiohttp', 'asyncio', 'numpy', 'rich.console', 'jinja2'}\n"
        "sys.exit(str(slow & sys.modules.keys()) if slow & sys.modules.keys() else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["ps"], ["status", "--json"], ["stop"], ["load", "tiny"]])
def test_without_a_daemon_the_message_says_how_to_start_one(
    quantd, environment: dict[str, str], command: list[str]
) -> None:
    done = quantd(*command)
    assert done.returncode == 1
    assert done.stdout == ""
    socket = Path(environment["QUANTD_HOME"]) / "run" / "api.sock"
    assert done.stderr == f"Error: No daemon answers at unix:{socket}. Start one with: quantd serve\n"


def test_every_error_is_one_line(quantd, tmp_path: Path, fake_daemon: FakeDaemon) -> None:
    (tmp_path / "bad.toml").write_text("[engine]\nkv_dtype = 'q9'")
    at = ("--socket", str(fake_daemon.socket))
    for args, message in [
        (
            ("serve", "--config", str(tmp_path / "bad.toml")),
            "bad.toml: engine.kv_dtype: 'q9' is not accepted",
        ),
        (("serve", "--kv-dtype", "q9"), "--kv-dtype: 'q9' is not accepted; use one of int8, fp16"),
        (("ps", "--host", "no:where"), "--host: 'no:where' is not accepted; use HOST[:PORT]"),
        (("load", "broken", *at), "shard 2 is missing"),
        (("run", "gone", "Hi", *at), "No model gone here; quantd pull gone"),
        (("run", "tiny", "Hi", "--temperature", "nan", *at), "nan and inf cannot be sent"),
    ]:
        done = quantd(*args)
        assert done.returncode == 1, args
        error = done.stderr.splitlines()[-1]
        assert error.startswith("Error: ") and message in error
        assert "Traceback" not in done.stderr


def test_a_home_that_cannot_be_written_is_named(quantd, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = {"QUANTD_HOME": str(tmp_path / "file" / "home")}
    for args in (("import", str(tmp_path)), ("pull", "smollm2"), ("run", "tiny", "Hi"), ("serve",)):
        done = quantd(*args, **home)
        assert done.returncode == 1, args
        assert done.stderr.startswith(f"Error: {home['QUANTD_HOME']}"), done.stderr
        assert done.stderr.count("\n") == 1 and "ot a directory" in done.stderr


def test_a_closed_stdout_is_no_fault(environment: dict[str, str]) -> None:
    command = [str(Path(sys.executable).with_name("quantd")), "list"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_open_shows_the_page_to_who_has_a_browser(quantd, fake_daemon: FakeDaemon, tmp_path: Path) -> None:
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    browser.chmod(0o755)
    none = {"BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    for variables in (none, none | {"BROWSER": str(browser)}):
        assert not seen.exists()
        done = quantd("open", "--socket", str(fake_daemon.socket), **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "http://127.0.0.1:11999/\n", "")
    assert seen.read_text() == "http://127.0.0.1:11999/\n"


def test_wrong_usage_is_status_2(quantd) -> None:
    for args in (("bogus",), ("load",), ("run", "tiny", "Hi", "--seed", "x"), ("run", "tiny", "--json")):
        assert quantd(*args).returncode == 2, args
    assert "The prompt is empty" in quantd("run", "tiny", input=" \n").stderr


def test_ps_and_status(quantd, fake_daemon: FakeDaemon) -> None:
    at = {"QUANTD_SOCKET": str(fake_daemon.socket)}
    assert [line.split() for line in quantd("ps", **at).stdout.splitlines()] == [
        ["NAME", "STATE", "SIZE", "KV", "CONTEXT", "RUNNING", "WAITING", "UNLOADS", "IN"],
        ["tiny", "ready", "142.0", "MB", "int8", "50.0", "MB", "1600", "2", "1", "14", "min"],
        ["big", "loading", "-", "-", "-", "-", "-", "-"],
    ]
    assert json.loads(quantd("ps", "--json", **at).stdout) == STATUS["models"]
    assert json.loads(quantd("status", "--json", **at).stdout) == STATUS
    told = quantd("status", **at).stdout
    assert "up 61 s" in told and "tiny (ready, pinned), big (loading 25 %)" in told
    assert "tiny, 12 s: behind 2 requests" in told
    assert "bad, its engine died too often: it was killed; again with: quantd load bad" in told


def test_load_unload_stop(quantd, fake_daemon: FakeDaemon) -> None:
    at = ("--socket", str(fake_daemon.socket))
    loaded = quantd("load", "tiny", *at)
    assert loaded.stdout.startswith(
        "tiny is loaded: llama on cpu kernels, 92.0 MB of weights, int8 KV cache of 1600"
    )
    assert loaded.stderr == "loading tiny: 50 %\n"
    assert json.loads(quantd("load", "tiny", "--json", *at).stdout) == INFO
    quantd(
        "load", "tiny", "--kv-dtype", "f16", "--no-prefix-caching", "--same-bits", "--kv-memory", "1M", *at
    )
    assert fake_daemon.loads[-1]["options"] == {
        "kv_dtype": "fp16",
        "prefix_caching": False,
        "same_bits": True,
        "kv_memory": 2**20,
    }
    assert quantd("unload", "tiny", *at).stdout == "tiny is unloaded.\n"
    assert json.loads(quantd("stop", "--json", *at).stdout) == {"pid": STATUS["pid"], "stopped": True}


def test_run_once(quantd, fake_daemon: FakeDaemon) -> None:
    at = ("--socket", str(fake_daemon.socket))
    done = quantd("run", "tiny", "Hi", "--system", "Be brief", "--top-p", "0.5", "--max-tokens", "5", *at)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there\n", "loading tiny: 50 %\n")
    assert fake_daemon.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "top_p": 0.5,
            "max_tokens": 5,
        }
    ]


def test_an_answer_that_is_cut_ends_its_line(quantd, fake_daemon: FakeDaemon) -> None:
    fake_daemon.cut = True
    done = quantd("run", "tiny", "Hi", "--socket", str(fake_daemon.socket))
    assert (done.returncode, done.stdout) == (1, "Hello there\n")
    assert "Error: The daemon ended the answer before it was complete." in done.stderr


def test_a_model_without_kernels_is_told(quantd, fake_daemon: FakeDaemon) -> None:
    at = ("--socket", str(fake_daemon.socket))
    assert "many times slower" in quantd("run", "slow", "Hi", *at).stderr
    assert "many times slower" in quantd("load", "slow", *at).stderr
    assert "slower" not in quantd("load", "slow", "--backend", "reference", *at).stderr
    assert "slower" not in quantd("load", "tiny", *at).stderr


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("box", ("box", 11435)),
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("http://127.0.0.1:8080/", ("127.0.0.1", 8080)),
        ("[::1]", ("::1", 11435)),
        ("[::1]:1", ("::1", 1)),
    ],
)
def test_the_port_of_a_host_may_be_left_out(text: str, address: tuple[str, int]) -> None:
    assert parse_host(text) == address


@pytest.mark.parametrize(
    "text", ["", ":1", "box:", "box:0", "box:65536", "a:b", "::1", "[::1", "https://box", "a/b"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_host(text)


def test_run_takes_a_piped_prompt_and_says_what_ran(quantd, fake_daemon: FakeDaemon) -> None:
    done = quantd("run", "tiny", "--verbose", "--socket", str(fake_daemon.socket), input="größer?\n")
    assert done.stdout == "Hello there\n"
    assert fake_daemon.bodies[0]["messages"] == [{"role": "user", "content": "größer?\n"}]
    assert f"tiny over unix:{fake_daemon.socket}: llama on cpu kernels" in done.stderr
    assert "9 prompt tokens (4 cached)" in done.stderr


def test_run_json_is_one_object(quantd, fake_daemon: FakeDaemon) -> None:
    answer = json.loads(quantd("run", "tiny", "Hi", "--json", "--socket", str(fake_daemon.socket)).stdout)
    assert (answer["content"], answer["finish_reason"]) == ("Hello there", "stop")
    assert answer["usage"]["completion_tokens"] == 2


def test_ctrl_c_closes_the_connection_and_is_quiet(
    environment: dict[str, str], fake_daemon: FakeDaemon
) -> None:
    fake_daemon.endless = True
    command = [Path(sys.executable).with_name("quantd"), "run", "tiny", "Hi", "--socket", fake_daemon.socket]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(12) == b"Hello there."
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert b"Traceback" not in process.stderr.read()
    assert fake_daemon.left.wait(PATIENCE)


def test_ctrl_c_while_modules_are_imported_is_quiet(quantd, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = quantd("ps", PYTHONPATH=paths)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_leaves_is_no_traceback(environment: dict[str, str], fake_daemon: FakeDaemon) -> None:
    fake_daemon.endless = True
    command = [Path(sys.executable).with_name("quantd"), "run", "tiny", "Hi", "--socket", fake_daemon.socket]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.wait(PATIENCE) == 1
        assert b"Traceback" not in process.stderr.read()
    assert fake_daemon.left.wait(PATIENCE)


def test_the_shell_completes_commands_and_models(quantd, environment: dict[str, str]) -> None:
    folder = Path(environment["QUANTD_HOME"]) / "models" / "tiny"
    folder.mkdir(parents=True)
    manifest = {"name": "tiny", "source": "file:/x", "description": "", "architecture": "llama"}
    (folder / "quantd.json").write_text(json.dumps(manifest | {"bytes": 1, "created": 0.0}))
    for words, index, answer in (("quantd un", 1, "unload"), ("quantd run ti", 2, "tiny")):
        done = quantd(_QUANTD_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(index))
        assert done.stdout.split() == [f"plain,{answer}"]


def test_doctor_reports_without_a_daemon(quantd, environment: dict[str, str]) -> None:
    share_kernels(Path(environment["QUANTD_HOME"]))
    done = quantd("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == bool(report["faults"])
    assert all(
        each.keys() == {"section", "name", "what", "fix"} for each in report["faults"] + report["notes"]
    )
    assert report["processor"]["kernels"].startswith(("cpu ", "reference"))
    assert report["versions"]["quantd"] == "0.1.0"
    assert report["gpus"]["torch"] == report["versions"]["torch"]
    assert isinstance(report["gpus"]["problems"], list)
    assert report["sockets"] == {f"{environment['QUANTD_HOME']}/run/api.sock": "no daemon"}
