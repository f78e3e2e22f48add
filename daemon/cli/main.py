"""The command `quantd`: the table of subcommands, and how every failure ends.

A subcommand's module is imported when it is needed, and none imports torch, aiohttp or rich at its top.
"""

from __future__ import annotations

import importlib
import sys

import click

from quantd.daemon.endings import end_tidily
from quantd.kernels.errors import QuantdError

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


class _Commands(click.Group):
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


def main() -> int:
    """Run the command line; the exit status: 0, 1 for an error, 2 for wrong usage, 128 + N after signal N."""
    end_tidily()
    try:
        status = cli.main(prog_name="quantd", standalone_mode=False)
        if sys.stdout is not None:  # as it is where the shell closed it
            sys.stdout.flush()
    except QuantdError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader (`head`, a pager) has gone. Python would complain when it flushes stdout at the end.
        sys.stdout = None
        return 1
    except OSError as error:
        # A full disk, a folder that is read-only: they can meet any command in any file.
        file = error.filename2 or error.filename
        click.echo(f"Error: {f'{file}: ' if file else ''}{error.strerror or error}", err=True)
        return 1
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
