"""`quantd cache ls | rm | pin`: the prefixes on disk, of the daemon, or of the user where none runs."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from quantd.daemon.cli.client import find_daemon
from quantd.daemon.cli.groups import CommandGroup
from quantd.daemon.cli.options import client_options, json_option
from quantd.daemon.cli.output import format_bytes, format_time, print_json, print_table
from quantd.daemon.config import Paths, client_sockets
from quantd.daemon.errors import NoDaemonError


@click.group("cache", cls=CommandGroup)
def cache_command() -> None:
    """Show, delete or pin the prefixes of prompts that are kept on disk."""


@cache_command.command("ls")
@client_options
@json_option
def ls_command(socket: str | None, host: str | None, as_json: bool) -> None:
    """List the prefixes, the latest used first; what goes on from one comes behind it."""
    prefixes = _ask(socket, host, "GET", "/quantd/cache", {})["prefixes"]
    if as_json:
        print_json(prefixes)
    else:
        header = ("ID", "MODEL", "KV", "TOKENS", "SIZE", "USED", "PINNED", "UNDER")
        print_table(header, [_row(prefix) for prefix in prefixes])


@cache_command.command("rm")
@click.argument("ids", nargs=-1)
@click.option("--model", metavar="NAME", help="Delete all prefixes of a model.")
@click.option("--all", "everything", is_flag=True, help="Delete all prefixes.")
@client_options
@json_option
def rm_command(
    ids: tuple[str, ...],
    model: str | None,
    everything: bool,
    socket: str | None,
    host: str | None,
    as_json: bool,
) -> None:
    """Delete prefixes, with all that goes on from them, pinned ones too."""
    if not (ids or model or everything):
        raise click.UsageError("Say which: ids that quantd cache ls shows, --model NAME, or --all.")
    body = {"ids": ids, "model": model, "all": everything}
    removed = _ask(socket, host, "POST", "/quantd/cache/rm", body)
    if as_json:
        print_json(removed)
    else:
        count = removed["prefixes"]
        click.echo(
            f"Removed {count} {'prefix' if count == 1 else 'prefixes'}, {format_bytes(removed['bytes'])}."
        )


@cache_command.command("pin")
@click.argument("ids", nargs=-1, required=True)
@click.option("--off", is_flag=True, help="Pin them no more, nor what goes on from them.")
@client_options
@json_option
def pin_command(ids: tuple[str, ...], off: bool, socket: str | None, host: str | None, as_json: bool) -> None:
    """Keep prefixes, and what they go on from, however long they are not used."""
    body = {"ids": ids, "pinned": not off}
    prefixes = _ask(socket, host, "POST", "/quantd/cache/pin", body)["prefixes"]
    if as_json:
        print_json(prefixes)
    else:
        click.echo(f"{'Not pinned' if off else 'Pinned'}: {', '.join(prefix['id'] for prefix in prefixes)}")


def _ask(socket: str | None, host: str | None, method: str, path: str, body: dict[str, Any]) -> Any:
    """The answer of the daemon, or what it would be where none runs and none was asked for by address."""
    try:
        client = find_daemon(client_sockets(socket), host)
    except NoDaemonError:
        if socket is not None or host is not None:
            raise
        return _answer_oneself(path, body)
    return client.get(path) if method == "GET" else client.post(path, body)


def _answer_oneself(path: str, body: dict[str, Any]) -> Any:
    from quantd.daemon.stored_prefixes import StoredPrefixes  # the store takes 0.1 s

    stored = StoredPrefixes(Paths.from_env().prefixes)
    match path.rpartition("/")[2]:
        case "rm":
            removed = stored.remove(body["ids"], body["model"], body["all"])
            return {"prefixes": removed.prefixes, "bytes": removed.num_bytes}
        case "pin":
            return {"prefixes": msgspec.to_builtins(stored.pin(body["ids"], body["pinned"]))}
        case _:
            return {"prefixes": msgspec.to_builtins(stored.all())}


def _row(prefix: dict[str, Any]) -> tuple[object, ...]:
    under = prefix["under"] or "-"
    size, used = format_bytes(prefix["bytes"]), format_time(prefix["used"])
    pinned = "yes" if prefix["pinned"] else "no"
    return prefix["id"], prefix["model"], prefix["kv_dtype"], prefix["tokens"], size, used, pinned, under
