"""`quantd plan`: whether a model fits, and with how many tokens, before it is loaded."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import click
import msgspec

from quantd.daemon.cli.client import find_daemon
from quantd.daemon.cli.options import client_options, json_option, model_argument, settings_options
from quantd.daemon.cli.output import print_json, spinner
from quantd.daemon.config import EngineOptions, client_sockets, load_config, parse_flags
from quantd.daemon.errors import ConfigError, DaemonError, NoDaemonError
from quantd.engine.config import Allowance, EngineConfig
from quantd.engine.memory_plan import MemoryPlan, lines_of, size_text
from quantd.engine.messages import Failed


@click.command("plan")
@model_argument
@click.option("--context", type=click.IntRange(1), help="Tokens of a client's request; as --max-model-len.")
@click.option("--clients", type=click.IntRange(1), help="Such requests that are to fit at a time.")
@settings_options(EngineOptions)
@client_options
@json_option
def plan_command(
    name: str,
    context: int | None,
    clients: int | None,
    socket: str | None,
    host: str | None,
    as_json: bool,
    **flags: object,
) -> int:
    """Show what loading a model would take of the memory that is free. Status 1 where it does not fit.

    Reads headers alone. Options that are not given are those of the configuration file.
    """
    if context is not None and flags["max_model_len"] is not None:
        raise ConfigError("--context and --max-model-len are one thing: give one of them")
    flags["max_model_len"] = context if context is not None else flags["max_model_len"]
    plan = ask_for_plan(_config(name, flags, _allowance(name, socket, host)))
    wanted = Wanted(clients or 1, context or min(plan.max_model_len, plan.kv_tokens), plan)
    if as_json:
        print_json(_as_dict(name, wanted))
    elif plan.fault is not None:
        click.echo(f"{name} on {plan.backend} does not fit: {plan.fault}\n{lines_of(plan.table)}")
    else:
        click.echo(f"{name} on {plan.backend}:\n{lines_of([*plan.table, ('clients', wanted.text)])}")
    return 0 if wanted.fit else 1


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Requests of so many tokens that are to run at a time, in a plan's KV cache."""

    clients: int
    context: int
    plan: MemoryPlan

    @property
    def num_bytes(self) -> int:
        """What they take of the cache."""
        return self.clients * self.plan.kv_bytes_of(self.context)

    @property
    def fit(self) -> bool:
        """Whether the model does, and they do."""
        return self.plan.fault is None and self.num_bytes <= self.plan.kv_bytes

    @property
    def text(self) -> str:
        """In words."""
        most = self.plan.kv_bytes // self.plan.kv_bytes_of(self.context)
        asked = f"{self.clients} of {self.context} tokens: {size_text(self.num_bytes)}"
        return f"{asked}, {'which fit' if self.fit else 'too many'}; at most {most} do"


def _config(name: str, flags: dict[str, object], allowance: Allowance) -> EngineConfig:
    from quantd.daemon.store import Store  # 0.1 s, which `quantd --help` need not wait for

    config = load_config({})
    options = dataclasses.replace(config.engine, **parse_flags(EngineOptions, flags))
    engine = options.for_model(Store(config.paths.models).get(name).path, config.paths.kernels)
    return msgspec.structs.replace(engine, allowance=allowance)


def _allowance(name: str, socket: str | None, host: str | None) -> Allowance:
    """What a daemon that runs would let the model take; all there is without one."""
    try:
        status = find_daemon(client_sockets(socket), host).get("/quantd/status")
    except NoDaemonError:
        return Allowance()
    if name in (model["name"] for model in status["models"]):
        click.echo(f"{name} is in memory now; what it takes there counts as taken.", err=True)
    return msgspec.convert(status.get("allowance", {}), Allowance)


def ask_for_plan(config: EngineConfig) -> MemoryPlan:
    """The plan of a process of its own, since that takes torch. Raises DaemonError, with its reason."""
    command = [sys.executable, "-P", "-m", "quantd.engine.planning", msgspec.json.encode(config).decode()]
    with spinner("reading headers ..."):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer = msgspec.json.decode(done.stdout, type=MemoryPlan | Failed)
    except msgspec.DecodeError:
        raise DaemonError(
            (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        ) from None
    if isinstance(answer, Failed):
        raise DaemonError(answer.message)
    return answer


def _as_dict(name: str, wanted: Wanted) -> dict[str, Any]:
    plan = wanted.plan
    fields: dict[str, Any] = {"model": name} | msgspec.to_builtins(plan)
    fields |= {"kv_bytes_per_token": plan.block_bytes // plan.block_size, "kv_bytes": plan.kv_bytes}
    fields |= {"kv_tokens": plan.kv_tokens, "clients": wanted.clients, "context": wanted.context}
    return fields | {"clients_bytes": wanted.num_bytes, "fits": wanted.fit}
