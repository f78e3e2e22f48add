"""`quantd bench`: how fast a model is through the daemon, and how full its KV cache is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quantd.daemon.bench.loads import Load, check_loads, standard_loads
from quantd.daemon.bench.plot import check_plot, save_plot
from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.cli.control import describe, load_model
from quantd.daemon.cli.options import Decorator, client_options, json_option, model_argument
from quantd.daemon.cli.output import print_json
from quantd.daemon.cli.spawn import daemon_for_command
from quantd.daemon.config import Paths
from quantd.engine.messages import ModelInfo

if TYPE_CHECKING:
    from quantd.daemon.bench.results import Result

_MAX_CLIENTS = 256


def _parse_clients(context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(numbers) != text.count(",") + 1 or not all(1 <= number <= _MAX_CLIENTS for number in numbers):
        raise click.BadParameter(f"{text!r}: give numbers from 1 to {_MAX_CLIENTS}, such as 4,16")
    return numbers


def _length_option(flag: str, default: int, text: str) -> Decorator:
    return click.option(flag, type=click.IntRange(1), default=default, show_default=True, help=text)


@click.command("bench")
@model_argument
@click.option(
    "--clients",
    callback=_parse_clients,
    default="4,16",
    show_default=True,
    help="Numbers of clients to measure, beside one.",
)
@_length_option("--prompt-len", 63, "Tokens of a prompt.")
@_length_option("--output-len", 96, "Tokens of an answer.")
@_length_option("--prefill-len", 512, "Tokens of the long prompt.")
@_length_option("--prefix-len", 700, "Tokens that 8 clients have in common before their prompts.")
@_length_option("--repeats", 3, "Times that each is measured; the medians count.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the results into this .svg or .png.")
@client_options
@json_option
def bench_command(
    name: str,
    repeats: int,
    plot: Path | None,
    socket: str | None,
    host: str | None,
    as_json: bool,
    **shape: Any,
) -> None:
    """Measure a model through the daemon: decode, prefill, several clients, a shared prefix.

    Prompts are random token ids, answers go on to their full length. What else the daemon does meanwhile
    shows in the figures.
    """
    loads = standard_loads(
        shape["clients"], shape["prompt_len"], shape["output_len"], shape["prefill_len"], shape["prefix_len"]
    )
    if plot is not None:
        check_plot(plot)
    with daemon_for_command(socket, host, Paths.from_env().log) as client:
        info = load_model(client, name)
        check_loads(loads, info)
        results = _measure(client, name, info, loads, repeats)
    if plot is not None:
        save_plot(results, f"{name}: {describe(info)}", plot)
    if as_json:
        print_json(_as_dict(name, info, results))
    else:
        from quantd.daemon.bench.table import print_results  # rich, 0.1 s

        print_results(f"{name}: {describe(info)}", results)


def _measure(
    client: DaemonClient, name: str, info: ModelInfo, loads: Sequence[Load], repeats: int
) -> list[Result]:
    import asyncio  # which, with aiohttp, no other command needs

    from quantd.daemon.bench.session import run_loads

    def tell(load: Load) -> None:
        click.echo(f"measuring {load.kind}, clients: {load.num_clients} ...", err=True)

    return asyncio.run(run_loads(client.address, name, info, loads, repeats, tell, headers=client.headers))


def _as_dict(name: str, info: ModelInfo, results: Sequence[Result]) -> dict[str, Any]:
    """Rates in tokens a second, times in seconds."""
    return {"model": name, "info": msgspec.structs.asdict(info), "results": msgspec.to_builtins(results)}
