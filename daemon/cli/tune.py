"""`quantd tune`: measures on this GPU how a model's products run best, once, for all engines to come."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from quantd.daemon.cli.options import json_option, model_argument
from quantd.daemon.cli.output import print_json
from quantd.daemon.config import EngineOptions, Paths
from quantd.daemon.errors import DaemonError


@click.command("tune")
@model_argument
@json_option
def tune_command(name: str, as_json: bool) -> None:
    """Measure how a model's products run best on this GPU, for some minutes.

    What is found is kept and used by every load from then on; without it kernels run as shipped. Unload
    models first: the GPU must be free.
    """
    from quantd.daemon.store import Store  # 0.1 s

    paths = Paths.from_env()
    config = EngineOptions(backend="gpu").for_model(Store(paths.models).get(name).path, paths.kernels)
    last: dict[str, Any] = {}
    for last in _tune(msgspec.json.encode(config).decode()):
        click.echo(f"measured {last['done']} of {last['total']} shapes of product", err=True)
    if as_json:
        print_json({"model": name, "shapes": last["total"], "path": last["path"]})
    else:
        click.echo(f"what was found is in {last['path']}")


def _tune(config: str) -> Iterator[dict[str, Any]]:
    """What a process of its own tells, since that takes torch. Raises DaemonError; it tells its reason."""
    command = [sys.executable, "-P", "-m", "quantd.engine.tune", config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield msgspec.json.decode(line)
    if process.returncode:
        raise DaemonError(f"tuning ended with status {process.returncode}, for the reason above")
