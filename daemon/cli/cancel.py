"""`quantd cancel`: which requests are under way, and the end of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from quantd.daemon.cli.client import find_daemon
from quantd.daemon.cli.options import client_options, json_option
from quantd.daemon.cli.output import format_time_left, print_json, print_table
from quantd.daemon.config import client_sockets
from quantd.daemon.errors import DaemonError, RequestNotFoundError


@click.command("cancel")
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Cancel all requests.")
@client_options
@json_option
def cancel_command(
    ids: tuple[str, ...], everything: bool, socket: str | None, host: str | None, as_json: bool
) -> None:
    """Cancel requests under way, by ids or their beginnings; without any, list them.

    What a request holds is free after the step that runs; its client is told.
    """
    client = find_daemon(client_sockets(socket), host)
    requests = client.get("/quantd/status")["requests"]
    if not (ids or everything):
        _list(requests, as_json)
        return
    there = [request["id"] for request in requests]
    chosen = dict.fromkeys(there if everything else [_match(id, there) for id in ids])
    cancelled = []
    for id in chosen:
        try:
            cancelled.append(client.post("/quantd/cancel", {"id": id})["id"])
        except DaemonError as error:
            if not everything or error.code != "request_not_found":  # it has ended by itself
                raise
    if as_json:
        print_json({"cancelled": cancelled})
    else:
        told = f"Cancelled: {', '.join(cancelled)}"
        click.echo(told if cancelled else "Cancelled nothing: no request is under way.")


def _list(requests: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(requests)
    elif not requests:
        click.echo("No request is under way.")
    else:
        header = ("ID", "CLIENT", "REQUEST", "MODEL", "DOES", "OUT", "TIME")
        print_table(header, [_row(request) for request in requests])


def _row(request: dict[str, Any]) -> tuple[object, ...]:
    path = request["route"].rpartition(" ")[2]
    time = format_time_left(request["seconds"])
    name, model = request["client"]["name"], request["model"] or "-"
    return request["id"], name, path, model, request["phase"], request["output_tokens"], time


def _match(id: str, there: Sequence[str]) -> str:
    """The request of this id, or the only one that begins so. Raises RequestNotFoundError or DaemonError."""
    found = [id] if id in there else [known for known in dict.fromkeys(there) if known.startswith(id)]
    if not found:
        raise RequestNotFoundError(f"no request {id!r} is under way; quantd cancel lists those that are")
    if len(found) > 1:
        raise DaemonError(f"{len(found)} requests begin with {id!r}: {', '.join(found)}; say more of the id")
    return found[0]
