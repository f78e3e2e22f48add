"""`quantd load | unload | ps | status | stop`: what a running daemon does."""

from __future__ import annotations

import os
import select
from typing import Any

import click
import msgspec

from quantd.daemon.cli.client import DaemonClient, find_daemon
from quantd.daemon.cli.options import client_options, json_option, model_argument, settings_options
from quantd.daemon.cli.output import format_bytes, format_time_left, print_json, print_table, progress
from quantd.daemon.config import EngineOptions, client_sockets, parse_flags
from quantd.daemon.errors import DaemonError
from quantd.engine.messages import ModelInfo

_STOP_SECONDS = 120.0


@click.command("load")
@model_argument
@click.option("--pin/--no-pin", default=None, help="Keep it in memory until quantd unload; or no longer.")
@settings_options(EngineOptions)
@client_options
@json_option
def load_command(
    name: str, pin: bool | None, socket: str | None, host: str | None, as_json: bool, **flags: object
) -> None:
    """Load a model into memory. Options that are not given are the daemon's."""
    options = parse_flags(EngineOptions, flags)
    info = load_model(find_daemon(client_sockets(socket), host), name, options, pin)
    if as_json:
        print_json(msgspec.structs.asdict(info))
    else:
        click.echo(f"{name} is loaded: {describe(info)}")


@click.command("unload")
@model_argument
@client_options
@json_option
def unload_command(name: str, socket: str | None, host: str | None, as_json: bool) -> None:
    """Drop a model from memory."""
    answer = find_daemon(client_sockets(socket), host).post("/quantd/unload", {"model": name})
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{name} is unloaded.")


@click.command("ps")
@client_options
@json_option
def ps_command(socket: str | None, host: str | None, as_json: bool) -> None:
    """List the models in memory and what they do."""
    models = find_daemon(client_sockets(socket), host).get("/quantd/status")["models"]
    if as_json:
        print_json(models)
    else:
        header = ("NAME", "STATE", "SIZE", "KV", "CONTEXT", "RUNNING", "WAITING", "UNLOADS IN")
        print_table(header, [_ps_row(model) for model in models])


@click.command("status")
@client_options
@json_option
def status_command(socket: str | None, host: str | None, as_json: bool) -> None:
    """Show the daemon that answers."""
    status = find_daemon(client_sockets(socket), host).get("/quantd/status")
    if as_json:
        print_json(status)
        return
    models = ", ".join(f"{model['name']} ({_state(model)})" for model in status["models"]) or "none"
    click.echo(f"quantd {status['version']}, process {status['pid']}, up {int(status['uptime_seconds'])} s")
    click.echo(f"Listening: {', '.join(status['listening'])}")
    click.echo(f"Models:    {models}")
    waiting = [(model["name"], wait) for model in status["models"] for wait in model.get("waiting", ())]
    for name, wait in waiting:
        click.echo(f"Waiting:   {name}, {wait['seconds']:.0f} s: {wait['why']}")
    for name, reason in status.get("stopped", {}).items():
        click.echo(f"Stopped:   {name}, its engine died too often: {reason}; again with: quantd load {name}")


@click.command("stop")
@client_options
@json_option
def stop_command(socket: str | None, host: str | None, as_json: bool) -> None:
    """Let running requests finish, then end the daemon."""
    client = find_daemon(client_sockets(socket), host)
    pid = client.get("/quantd/status")["pid"]
    ended = _stop_and_wait(client, pid)
    if as_json:
        print_json({"pid": pid, "stopped": ended})
    else:
        click.echo("Stopped." if ended else f"Process {pid} still finishes its requests.")


def load_model(
    client: DaemonClient, name: str, options: dict[str, Any] | None = None, pin: bool | None = None
) -> ModelInfo:
    """Load a model, with its progress on stderr; what the daemon says of it. Raises DaemonError.

    `options` are fields of EngineOptions for this model alone. pin: see quantd.daemon.models.Models.load.
    """
    body = {"model": name, "options": options or {}} | ({} if pin is None else {"pin": pin})
    with progress() as report:
        for line in client.lines("/quantd/load", body):
            if line["status"] == "loading":
                stage = f"{name} {line['why']}" if line.get("why") else f"loading {name}"
                report(stage, line["done"], line["total"] or None)
            else:
                break
        else:
            raise DaemonError(f"The daemon ended before {name} was loaded.")
    info = _info(line["info"])
    if info.backend == "reference" and (options or {}).get("backend") != "reference":
        click.echo("Plain torch computes, many times slower than the kernels; why: quantd doctor", err=True)
    return info


def describe(info: ModelInfo) -> str:
    """A loaded model in one line."""
    weights, cache = format_bytes(info.weight_bytes), format_bytes(info.kv_bytes)
    ranks = f" in {info.num_ranks} ranks" if info.num_ranks > 1 else ""
    return (
        f"{info.architecture} on {info.backend} kernels{ranks}, {weights} of weights, "
        f"{info.kv_dtype} KV cache of {info.kv_tokens} tokens ({cache})"
    )


def _state(model: dict[str, Any]) -> str:
    done, total = model["progress"]["done"], model["progress"]["total"]
    loaded = f" {100 * done // total} %" if model["state"] == "loading" and total else ""
    return f"{model['state']}{loaded}{', pinned' if model.get('pinned') else ''}"


def _ps_row(model: dict[str, Any]) -> tuple[object, ...]:
    """A line of `ps`. SIZE is all the memory a model takes, CONTEXT the tokens that one request can have."""
    if model["info"] is None:
        return model["name"], model["state"], "-", "-", "-", "-", "-", "-"
    info, stats = _info(model["info"]), model["stats"] or {}
    size, cache = format_bytes(info.weight_bytes + info.kv_bytes), format_bytes(info.kv_bytes)
    counts = (stats.get("num_running", "-"), stats.get("num_waiting", "-"))
    kv, left = f"{info.kv_dtype} {cache}", format_time_left(model.get("unloads_in"))
    return model["name"], model["state"], size, kv, info.max_request_len, *counts, left


def _info(fields: object) -> ModelInfo:
    try:
        return msgspec.convert(fields, ModelInfo)
    except msgspec.ValidationError as error:
        raise DaemonError(f"The daemon is of another version than this command ({error}).") from None


def _stop_and_wait(client: DaemonClient, pid: int) -> bool:
    """Whether the daemon's process has ended in time; true also where it cannot be seen from here."""
    try:
        process = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone already, out of sight, or a system other than Linux
        client.post("/quantd/stop", {})
        return True
    try:
        client.post("/quantd/stop", {})
        return bool(select.select([process], [], [], _STOP_SECONDS)[0])
    finally:
        os.close(process)
