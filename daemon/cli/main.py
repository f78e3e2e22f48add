"""The command `quantd`: how every failure ends. What it can do is in quantd.daemon.cli.commands."""

from __future__ import annotations

import sys

from quantd.daemon.endings import end_tidily


def main() -> int:
    """Run the command line; the exit status: 0, 1 for an error, 2 for wrong usage, 128 + N after signal N."""
    end_tidily()
    try:
        return _run()
    except KeyboardInterrupt:  # as early as while modules are imported
        return 130


def _run() -> int:
    import click

    from quantd.daemon.cli.commands import cli
    from quantd.kernels.errors import QuantdError

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
    except click.Abort:
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
