"""`quantd key add | ls | rm`: who may use the daemon over TCP."""

from __future__ import annotations

from typing import Any, Protocol

import click

from quantd.daemon.cli.client import DaemonClient, find_daemon
from quantd.daemon.cli.groups import CommandGroup
from quantd.daemon.cli.options import client_options, json_option
from quantd.daemon.cli.output import format_time, print_json, print_table
from quantd.daemon.config import client_sockets, load_config
from quantd.daemon.errors import NoDaemonError


class _Keys(Protocol):
    """Where keys are kept."""

    def add(self, name: str, scope: str) -> dict[str, Any]: ...

    def list(self) -> list[dict[str, Any]]: ...

    def remove(self, name: str) -> None: ...


class _DaemonsKeys:
    """Those of a daemon that runs, which may be another user's."""

    def __init__(self, client: DaemonClient) -> None:
        self._client = client

    def add(self, name: str, scope: str) -> dict[str, Any]:
        added: dict[str, Any] = self._client.post("/quantd/keys", {"name": name, "scope": scope})
        return added

    def list(self) -> list[dict[str, Any]]:
        keys: list[dict[str, Any]] = self._client.get("/quantd/keys")["keys"]
        return keys

    def remove(self, name: str) -> None:
        self._client.delete(f"/quantd/keys/{name}")


class _OwnKeys:
    """Those of the daemon that this user would start."""

    def __init__(self) -> None:
        config = load_config({})
        self._file = config.access.key_file(config.paths.state)

    def add(self, name: str, scope: str) -> dict[str, Any]:
        text = self._file.add(name, "admin" if scope == "admin" else "infer")
        return {"file": str(self._file.path), "name": name, "scope": scope, "key": text}

    def list(self) -> list[dict[str, Any]]:
        keys = self._file.all()
        return [{"name": key.name, "scope": key.scope, "created": key.created} for key in keys]

    def remove(self, name: str) -> None:
        self._file.remove(name)


@click.group("key", cls=CommandGroup)
def key_command() -> None:
    """API keys: who may use the daemon over TCP."""


@key_command.command("add")
@click.argument("name")
@click.option(
    "--scope",
    type=click.Choice(["infer", "admin"]),
    default="infer",
    show_default=True,
    help="admin may also pull, load and remove models, and make keys.",
)
@client_options
@json_option
def add(name: str, scope: str, socket: str | None, host: str | None, as_json: bool) -> None:
    """Make a key and show it, this once."""
    added = _keys(socket, host).add(name, scope)
    if as_json:
        print_json(added)
        return
    click.echo(f"Its hash is in {added['file']}; the key itself is kept nowhere:", err=True)
    click.echo(added["key"])


@key_command.command("ls")
@client_options
@json_option
def list_keys(socket: str | None, host: str | None, as_json: bool) -> None:
    """List the keys by name."""
    keys = _keys(socket, host).list()
    if as_json:
        print_json(keys)
    else:
        rows = [(key["name"], key["scope"], format_time(key["created"])) for key in keys]
        print_table(("NAME", "SCOPE", "CREATED"), rows)


@key_command.command("rm")
@click.argument("names", nargs=-1, required=True)
@client_options
@json_option
def remove(names: tuple[str, ...], socket: str | None, host: str | None, as_json: bool) -> None:
    """Remove keys; they count for nothing from then on."""
    keys = _keys(socket, host)
    for name in names:
        keys.remove(name)
    if as_json:
        print_json({"removed": names})
    else:
        click.echo(f"Removed {', '.join(names)}.")


def _keys(socket: str | None, host: str | None) -> _Keys:
    """The keys of the daemon that runs, else those that one of ours would find."""
    try:
        return _DaemonsKeys(find_daemon(client_sockets(socket), host))
    except NoDaemonError:
        if socket is not None or host is not None:
            raise
        return _OwnKeys()
