"""`quantd service install | uninstall | status`: the daemon as a service of systemd."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from quantd.daemon.cli.groups import CommandGroup
from quantd.daemon.cli.options import json_option
from quantd.daemon.cli.output import print_json
from quantd.daemon.cli.sleeping import running_daemons, tell
from quantd.daemon.config import config_home, is_root
from quantd.daemon.units import Units, properties

_SHOWN = ("ActiveState", "SubState", "StatusText", "MainPID", "MemoryCurrent", "NRestarts")

user_option = click.option(
    "--user/--system", default=None, help="Your own service, or the machine's. Default: --user unless root."
)


@click.group("service", cls=CommandGroup)
def service_command() -> None:
    """Have systemd start the daemon when it is needed."""


@service_command.command("install")
@user_option
def install(user: bool | None) -> None:
    """Write the units and listen: the first request starts the daemon."""
    units = _units(user)
    for path in units.install(Path(sys.executable).with_name("quantd")):
        click.echo(f"wrote {path}")
    click.echo("systemd listens for quantd; the first request starts it.")
    if units.user:
        click.echo("To keep it after you log out: loginctl enable-linger")
    else:
        click.echo("Who may use it: usermod -aG quantd NAME")
        click.echo("GPUs are let go before the machine sleeps, by the daemons of all users.")


@service_command.command("uninstall")
@user_option
def uninstall(user: bool | None) -> None:
    """End the daemon and remove its units. Models stay."""
    for path in _units(user).uninstall():
        click.echo(f"removed {path}")


@service_command.command("status")
@user_option
@json_option
def status(user: bool | None, as_json: bool) -> None:
    """What systemd knows of the daemon and its sockets."""
    units = _units(user)
    show = {
        name: properties(units.control("show", name, f"--property={','.join(_SHOWN)}"))
        for name in units.names
    }
    if as_json:
        print_json(show)
        return
    for name, values in show.items():
        details = [values[key] for key in ("ActiveState", "SubState", "StatusText") if values.get(key)]
        click.echo(f"{name}: {', '.join(details)}")


@service_command.command("sleep", hidden=True)
def sleep() -> None:
    """Have the daemons of this machine let go of the GPUs; for quantd-sleep.service."""
    tell(running_daemons(), "/quantd/sleep", click.echo)


@service_command.command("wake", hidden=True)
def wake() -> None:
    """Let them load models again."""
    tell(running_daemons(), "/quantd/wake", click.echo)


def _units(user: bool | None) -> Units:
    as_user = not is_root() if user is None else user
    return Units.of_user(config_home()) if as_user else Units.of_system()
