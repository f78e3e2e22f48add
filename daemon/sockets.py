"""The sockets that a daemon listens on. Every refusal names the path or port and the reason."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from quantd.daemon.errors import ListenError

# sun_path holds 108 bytes with its final zero (unix(7)).
_MAX_PATH = 107
# How many may wait to be accepted; the kernel takes fewer where net.core.somaxconn is less.
BACKLOG = 512


@contextlib.contextmanager
def unix_socket(path: Path, group: str | None = None) -> Iterator[socket.socket]:
    """A listening Unix socket, mode 0660 from the moment of its bind; the file goes with it at the end.

    group: that of the file, whose members may connect; None: that of this process. The file of a daemon that
    is gone is replaced: nobody accepts there, which a refused connection proves. Raises ListenError
    for a path that is too long, in use, or something else than a socket, and for a group that is not there
    or not ours to give.
    """
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ListenError(f"{path}: too long for a Unix socket, which takes {_MAX_PATH} bytes")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        own = _bind_unix(listener, path, group)
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == own:
                    path.unlink()


def _bind_unix(listener: socket.socket, path: Path, group: str | None) -> int:
    """Bind and listen; the inode of the socket file. One daemon at a time does this in a folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ListenError(f"{path}: cannot be used: {error.strerror}") from error
    umask = os.umask(0o117)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _clear_away(path)
        listener.bind(str(path))
        if group is not None:
            shutil.chown(path, group=group)
        listener.listen(BACKLOG)
        return path.stat().st_ino
    except LookupError as error:
        raise ListenError(f"{path}: there is no group {group!r} to give it to") from error
    except OSError as error:
        raise ListenError(f"{path}: cannot be bound: {error.strerror}") from error
    finally:
        os.umask(umask)
        os.close(folder)


def _clear_away(path: Path) -> None:
    """Make room for a socket at `path`. Raises ListenError where that would take something away."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path}: is there and is no socket; move it away or choose another --socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        outcome = probe.connect_ex(str(path))
    if outcome == errno.ECONNREFUSED:
        path.unlink()
    elif outcome == 0:
        raise ListenError(f"{path}: another daemon answers there; stop it or choose another --socket")
    elif outcome != errno.ENOENT:
        raise ListenError(f"{path}: is in use or not ours: {os.strerror(outcome)}")


@contextlib.contextmanager
def tcp_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listening sockets, one for each address that `host` stands for. Raises ListenError."""
    with contextlib.ExitStack() as opened:
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
            )
            listeners = [_tcp_socket(family, address, opened) for family, _, _, _, address in found]
        except OSError as error:
            raise ListenError(
                f"{host}:{port}: cannot be bound: {error.strerror}; choose another --port, or --port off"
            ) from error
        yield listeners


def _tcp_socket(
    family: int,
    address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes],
    opened: contextlib.ExitStack,
) -> socket.socket:
    listener = opened.enter_context(contextlib.closing(socket.socket(family, socket.SOCK_STREAM)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.bind(address)
    listener.listen(BACKLOG)
    return listener


def allow_open_files(number: int) -> None:
    """Let this process have so many files open, or as many as it may have at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))


def name_of(listener: socket.socket) -> str:
    """The address in words: unix:/path or http://host:port."""
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{address}"
    host = f"[{address[0]}]" if listener.family == socket.AF_INET6 else address[0]
    return f"http://{host}:{address[1]}"
