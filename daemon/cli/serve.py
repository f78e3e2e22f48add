"""`quantd serve`: the daemon in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from quantd.daemon.cli.options import settings_options
from quantd.daemon.config import PARTS, ServeConfig, load_config


@click.command("serve")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Read this file. Default: quantd.toml in the configuration folder, if there. Also: QUANTD_CONFIG.",
)
@settings_options(ServeConfig, *PARTS.values())
def serve_command(config: Path | None, **flags: object) -> int:
    """Run the daemon until it is stopped.

    Every option but --config can stand in the file; see the README for the tables there.
    """
    settings = load_config(flags, config)
    from quantd.daemon.server import run_server  # aiohttp, which no other command needs

    return run_server(settings)
