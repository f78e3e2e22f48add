"""`quantd logs`: what the daemon says, wherever it goes, and the log of requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from quantd.daemon.cli.client import find_daemon
from quantd.daemon.cli.tail import follow, last_lines
from quantd.daemon.config import Paths, client_sockets, config_home, load_config
from quantd.daemon.errors import DaemonError, NoDaemonError
from quantd.daemon.units import NAMES, Units

_UNIT = NAMES[0]


@click.command("logs")
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on with what is added.")
@click.option(
    "-n",
    "--lines",
    "count",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="Begin with so many of the latest lines.",
)
@click.option("--requests", is_flag=True, help="Show the requests that are over in place of messages.")
@click.option("--json", "as_json", is_flag=True, help="Print requests as they stand in the file.")
@click.option("--socket", metavar="PATH", help="Unix socket of the daemon (also: QUANTD_SOCKET).")
def logs_command(follows: bool, count: int, requests: bool, as_json: bool, socket: str | None) -> int:
    """Show what the daemon has to say: from systemd's journal, or its file.

    It need not run.
    """
    status = _status(socket)
    with suppress(KeyboardInterrupt):
        if requests:
            _print_requests(_lines(_request_log(status), follows, count), as_json)
            return 0
        place = _log_place(status)
        if isinstance(place, Path):
            _print(_lines(place, follows, count))
            return 0
        return _show_journal(place, follows, count)
    return 0


def _status(socket: str | None) -> Any | None:
    """What the daemon says of itself, if one answers."""
    try:
        return find_daemon(client_sockets(socket), None).get("/quantd/status")
    except (DaemonError, NoDaemonError):
        return None


def _request_log(status: Any | None) -> Path:
    path = load_config({}).request_log if status is None else status["request_log"]
    if path is None:
        raise DaemonError("The daemon logs no requests: start it without --request-log off.")
    return Path(path)


def _log_place(status: Any | None) -> Path | Sequence[str]:
    """The file, or journalctl's words for whose messages. Raises DaemonError where they are not kept."""
    if status is None:
        return _usual_place()
    log = status["log"]
    match log["kind"]:
        case "journal":
            return _journal_of(log.get("unit") or _UNIT, log.get("user", False))
        case "file":
            return Path(log["path"])
        case kind:
            where = f"to {log['path']}" if kind == "terminal" else "nowhere"
            raise DaemonError(
                f"The messages of the daemon that runs, process {status['pid']}, go {where} and are lost; "
                "quantd service install has systemd keep them."
            )


def _usual_place() -> Path | Sequence[str]:
    """Where a daemon that runs no more will have left its messages."""
    for units in (Units.of_user(config_home()), Units.of_system()):
        if (units.folder / _UNIT).exists():
            return _journal_of(_UNIT, units.user)
    log = Paths.from_env().log
    if not log.exists():
        raise DaemonError(f"No daemon runs, and none has left messages in {log}.")
    return log


def _journal_of(unit: str, user: bool) -> Sequence[str]:
    return ("--user-unit" if user else "--unit", unit)


def _show_journal(whose: Sequence[str], follows: bool, count: int) -> int:
    """The status of journalctl, which does it all."""
    if shutil.which("journalctl") is None:
        raise DaemonError("The messages are in systemd's journal, but journalctl is not here.")
    command = ["journalctl", *whose, "--lines", str(count), *(["--follow"] if follows else [])]
    return subprocess.run(command, check=False).returncode


def _lines(path: Path, follows: bool, count: int) -> Iterable[str]:
    if follows:
        return follow(path, count)
    if not path.exists():
        raise DaemonError(f"{path} is not there yet.")
    return last_lines(path, count)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
        sys.stdout.flush()


def _print_requests(lines: Iterable[str], as_json: bool) -> None:
    _print(lines if as_json else _readable(lines))


def _readable(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        try:
            yield _request_line(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            yield line


def _request_line(entry: dict[str, Any]) -> str:
    """Such as: 14:05:11 zed POST /v1/chat/completions tiny 200 stop 412 (380 cached) + 96 tokens 1.92 s."""
    moment = datetime.fromisoformat(entry["time"]).astimezone()
    words = [moment.strftime("%Y-%m-%d %H:%M:%S"), entry["program"], entry["route"], entry["model"] or "-"]
    words += [str(entry["status"]), entry["end"]]
    if entry["choices"]:
        cached = f" ({entry['cached_tokens']} cached)" if entry["cached_tokens"] else ""
        words.append(f"{entry['prompt_tokens']}{cached} + {entry['output_tokens']} tokens")
    words.append(f"{entry['total_seconds']:.2f} s")
    if entry["first_token_seconds"] is not None:
        words.append(f"(first token {entry['first_token_seconds']:.2f} s)")
    return "  ".join(words) + (f"  {entry['error']}" if entry["error"] else "")
