"""What a service manager and the daemon tell each other, in systemd's protocols.

Sources: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3), systemd.exec(5). Without a manager nothing is
said.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat

from quantd.daemon.errors import ListenError

_FIRST_FD = 3


@dataclass(frozen=True)
class Supervision:
    """What a manager has set up. watchdog_seconds: it ends a daemon that is silent for so long; None: never.

    num_sockets: listening sockets that it has handed over, as the file descriptors from 3 on. names: what it
    calls them, as far as it does (FileDescriptorName=).
    """

    notify_address: str | None = None
    watchdog_seconds: float | None = None
    num_sockets: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, env: Mapping[str, str], pid: int | None = None) -> Supervision:
        """Read the variables; those meant for another process, or set by half, count as none."""
        own = str(os.getpid() if pid is None else pid)
        handed = env.get("LISTEN_PID") == own and env.get("LISTEN_FDS", "").isdecimal()
        watched = env.get("WATCHDOG_PID", own) == own and env.get("WATCHDOG_USEC", "").isdecimal()
        return cls(
            notify_address=env.get("NOTIFY_SOCKET") or None,
            watchdog_seconds=int(env["WATCHDOG_USEC"]) / 1e6 if watched else None,
            num_sockets=int(env["LISTEN_FDS"]) if handed else 0,
            names=tuple(filter(None, env.get("LISTEN_FDNAMES", "").split(":"))) if handed else (),
        )

    def sockets(self) -> list[socket.socket]:
        """The sockets handed over, not passed on to children. Raises ListenError for what is none."""
        fds = range(_FIRST_FD, _FIRST_FD + self.num_sockets)
        names = chain(self.names, repeat("unnamed"))
        return [_listener(fd, name) for fd, name in zip(fds, names, strict=False)]


def _listener(fd: int, name: str) -> socket.socket:
    fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        listener = socket.socket(fileno=fd)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ListenError(f"file descriptor {fd} ({name}) from the service manager is no socket") from error
    if not listens or listener.type != socket.SOCK_STREAM:
        raise ListenError(
            f"file descriptor {fd} ({name}) from the service manager does not listen; use ListenStream= and "
            "Accept=no"
        )
    listener.setblocking(False)
    return listener


class Notifier:
    """Tells the manager how the daemon is. address: a path, or a name of the abstract kind after an @."""

    def __init__(self, address: str | None) -> None:
        self._address = None if address is None else address.replace("@", "\0", 1)
        self._status: str | None = None

    def ready(self) -> None:
        """The sockets answer."""
        self._send("READY=1")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1")

    def extend(self, seconds: float) -> None:
        """The end takes so long, unless this is said again."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def status(self, text: str) -> None:
        """What the daemon does, for people; told again only when it is another."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def alive(self) -> None:
        """Not yet, watchdog."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        """A manager that is gone, or too busy, is no fault of ours."""
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            try:
                channel.connect(self._address)
                channel.send(message.encode())
            except OSError:
                pass
