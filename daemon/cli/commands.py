"""The table of subcommands.

A subcommand's module is imported when it is needed, and none imports torch, aiohttp or rich at its top.
"""

from __future__ import annotations

import importlib

import click

from quantd.daemon.cli.groups import CommandGroup

_COMMANDS = {
    "serve": "serve",
    "run": "run",
    "pull": "models",
    "import": "models",
    "list": "models",
    "show": "models",
    "rm": "models",
    "plan": "plan",
    "load": "control",
    "unload": "control",
    "ps": "control",
    "status": "control",
    "top": "top",
    "logs": "logs",
    "cancel": "cancel",
    "stop": "control",
    "cache": "cache",
    "connect": "connect",
    "open": "open",
    "bench": "bench",
    "doctor": "doctor",
    "service": "service",
    "key": "key",
    "tune": "tune",
}


class _Commands(CommandGroup):
    """Subcommands by the table above: `import` is `import_command` of quantd.daemon.cli.models."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"quantd.daemon.cli.{_COMMANDS[name]}")
        command: click.Command = getattr(module, f"{name}_command")
        return command


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="quantd", message="quantd %(version)s")
def cli() -> None:
    """Serve quantized language models to the programs of this machine."""
