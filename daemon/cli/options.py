"""The options that commands share, and those generated from the configuration records."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import click

from quantd.daemon.config import Paths
from quantd.daemon.settings import Setting, settings_of

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _complete_name(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """The models on disk, for the shell to complete."""
    from quantd.daemon.store import Store  # 0.1 s, which only a completion needs

    names = [model.name for model in Store(Paths.from_env().models).list()]
    return [name for name in names if name.startswith(typed)]


model_argument = click.argument("name", shell_complete=_complete_name)


def client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--socket and --host: where the daemon of a client command is."""
    command = click.option("--host", metavar="HOST[:PORT]", help="Use TCP in place of the Unix socket.")(
        command
    )
    return click.option("--socket", metavar="PATH", help="Unix socket of the daemon (also: QUANTD_SOCKET).")(
        command
    )


def settings_options(*records: type[Any], only: Container[str] | None = None) -> Decorator:
    """One option for each setting of the records, in order; only: for those named. `load_config` parses the
    values.
    """
    settings = [setting for record in records for setting in settings_of(record).values()]
    settings = [setting for setting in settings if only is None or setting.name in only]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(settings):
            command = _option(setting)(command)
        return command

    return decorate


def _option(setting: Setting) -> Decorator:
    note = "" if setting.default in (None, "") else f" Default: {setting.default}."
    if setting.kind.is_switch:
        return click.option(
            f"{setting.flag}/--no-{setting.flag[2:]}", setting.name, default=None, help=setting.help + note
        )
    variable = f" Also: {setting.env}." if setting.env else ""
    return click.option(
        setting.flag, setting.name, metavar=setting.kind.metavar, help=setting.help + note + variable
    )
