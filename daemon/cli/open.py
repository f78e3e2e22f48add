"""`quantd open`: the daemon's page, in the browser of this desktop."""

from __future__ import annotations

import webbrowser

import click

from quantd.daemon.cli.client import find_daemon
from quantd.daemon.cli.options import client_options
from quantd.daemon.config import client_sockets, has_display


@click.command("open")
@client_options
def open_command(socket: str | None, host: str | None) -> None:
    """Open the daemon's page in a browser; print its address."""
    from quantd.daemon.cli.endpoint import tcp_address

    client = find_daemon(client_sockets(socket), host)
    name, port = tcp_address(client, client.get("/quantd/status")["listening"])
    url = f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
    click.echo(url)
    # A browser in this terminal is not what was asked for.
    if has_display():
        webbrowser.open(url)
