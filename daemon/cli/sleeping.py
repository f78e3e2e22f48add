"""The daemons of a machine that is about to sleep: all whose sockets root can reach."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.config import SYSTEM_SOCKET
from quantd.daemon.errors import DaemonError, NoDaemonError

RUNTIME_FOLDERS = Path("/run/user")
# The machine waits for no daemon longer than that.
_ANSWER_SECONDS = 20.0


def running_daemons(system: Path = SYSTEM_SOCKET, users: Path = RUNTIME_FOLDERS) -> Iterator[DaemonClient]:
    """Those that run. A socket on which only systemd listens is left alone, for that would start one."""
    for path in (system, *sorted(users.glob("*/quantd/api.sock"))):
        runtime = None if path == system else path.parents[1]
        # A link, which a user could have set, would lead root to somebody else's socket.
        if path.is_socket() and path == path.resolve() and not _only_listened_for(runtime):
            yield DaemonClient(path)


def _only_listened_for(runtime: Path | None) -> bool:
    """Whether systemd, or the user's whose runtime folder this is, listens in place of a daemon."""
    command = ["systemctl", *(["--user"] if runtime else []), "is-active", "quantd.socket", "quantd.service"]
    environment = os.environ | ({"XDG_RUNTIME_DIR": str(runtime)} if runtime else {})
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.split()[:2] in (["active", "inactive"], ["active", "failed"])


def tell(daemons: Iterable[DaemonClient], path: str, report: Callable[[str], None]) -> None:
    """Post to all of them at once, and report what each says."""

    def post(client: DaemonClient) -> str:
        try:
            answer: Any = client.post(path, {}, _ANSWER_SECONDS)
        except (DaemonError, NoDaemonError) as error:
            return str(error)
        unloaded = ", ".join(answer.get("unloaded", ())) or "nothing"
        return f"{client.url}: unloaded {unloaded}" if path.endswith("sleep") else f"{client.url}: awake"

    daemons = list(daemons)
    with ThreadPoolExecutor(max(len(daemons), 1)) as pool:
        for line in pool.map(post, daemons):
            report(line)
