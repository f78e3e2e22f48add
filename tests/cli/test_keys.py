"""`quantd key` without a daemon, and where commands find theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.config import client_key, load_config
from quantd.daemon.errors import ConfigError


def test_keys_of_a_daemon_that_does_not_run(quantd, environment: dict[str, str]) -> None:
    file = KeyFile(Path(environment["QUANTD_HOME"]) / "state" / "keys.json")
    done = quantd("key", "add", "laptop", "--scope", "admin")
    assert done.returncode == 0 and str(file.path) in done.stderr
    key = file.find(done.stdout.strip())
    assert key is not None and (key.name, key.scope) == ("laptop", "admin")
    listed = quantd("key", "ls", "--json").stdout
    assert [entry["name"] for entry in json.loads(listed)] == ["laptop"]
    assert done.stdout.strip() not in listed and key.sha256 not in listed
    assert quantd("key", "rm", "laptop").stdout == "Removed laptop.\n"
    assert not file.all()
    failed = quantd("key", "rm", "laptop")
    assert failed.returncode == 1 and "there is no key 'laptop'" in failed.stderr


def test_where_commands_find_their_key(tmp_path: Path) -> None:
    env = {"QUANTD_HOME": str(tmp_path)}
    assert client_key(env) is None
    (tmp_path / "quantd.toml").write_text(
        '[client]\nkey = "of the file"\n[access]\nallow_hosts = ["a", "b"]\n'
    )
    assert client_key(env) == "of the file"
    assert client_key(env | {"QUANTD_KEY": "of the environment"}) == "of the environment"
    assert load_config({}, env=env).access.allow_hosts == ("a", "b")
    assert load_config({"allow_hosts": "c, d,"}, env=env).access.allow_hosts == ("c", "d")
    (tmp_path / "quantd.toml").write_text("[client]\nkeys = 1")
    with pytest.raises(ConfigError, match=r"client\.keys: no such key; did you mean key"):
        client_key(env)
