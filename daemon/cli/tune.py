"""`quantd tune`: measures how a model's products run best on these GPUs, once, for all engines to come."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from quantd.daemon.cli.options import json_option, model_argument, settings_options
from quantd.daemon.cli.output import print_json
from quantd.daemon.config import EngineOptions, load_config
from quantd.daemon.errors import DaemonError


@click.command("tune")
@model_argument
@settings_options(EngineOptions, only=("activations", "tp", "split"))
@json_option
def tune_command(name: str, as_json: bool, **flags: object) -> None:
    """Measure how a model's products run best on the GPUs that it takes, for some minutes each.

    Give --tp and --split as for a load: what each GPU computes depends on them. What is found is kept and
    used by every load from then on; without it kernels run as shipped. Unload models first: the GPUs must be
    free. Options that are not given are those of the configuration file.
    """
    from quantd.daemon.store import Store  # 0.1 s

    config = load_config(flags)
    options = dataclasses.replace(config.engine, backend="gpu")
    engine = options.for_model(Store(config.paths.models).get(name).path, config.paths.kernels)
    found: dict[str, dict[str, Any]] = {}
    for told in _tune(msgspec.json.encode(engine).decode()):
        click.echo(f"{told['gpu']}: measured {_progress(told)}", err=True)
        before = found.get(told["gpu"], {}).get("shapes", 0)
        found[told["gpu"]] = {"gpu": told["gpu"], "shapes": before + 1, "path": told["path"]}
    if as_json:
        print_json({"model": name, "gpus": list(found.values())})
    else:
        for gpu in found.values():
            click.echo(f"what was found of {gpu['gpu']} is in {gpu['path']}")


def _progress(told: dict[str, Any]) -> str:
    return f"{told['done']} of {told['total']} shapes of product of rank {told['rank']}"


def _tune(config: str) -> Iterator[dict[str, Any]]:
    """What a process of its own tells, since that takes torch. Raises DaemonError; it tells its reason."""
    command = [sys.executable, "-P", "-m", "quantd.engine.tune", config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield msgspec.json.decode(line)
    if process.returncode:
        raise DaemonError(f"tuning ended with status {process.returncode}, for the reason above")
