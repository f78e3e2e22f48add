"""Where clients find a daemon: its Unix sockets and their rights, and who holds its TCP port."""

from __future__ import annotations

import contextlib
import grp
import ipaddress
import os
import pwd
import shlex
import stat
from collections.abc import Iterator, Set
from pathlib import Path

from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.config import SYSTEM_SOCKET, load_config
from quantd.daemon.doctor.finding import Finding, read_text
from quantd.daemon.errors import ConfigError, DaemonError, NoDaemonError

GROUP = "quantd"
_PROC = Path("/proc")
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp (proc_pid_net(5))


def look_at_socket(path: Path) -> Finding:
    """Whether a daemon answers there, for us."""
    try:
        status = DaemonClient(path).get("/quantd/status")
    except NoDaemonError:
        if not path.is_socket():
            return Finding("sockets", str(path), "no daemon")
        note, fix = (
            "the file of a daemon that is gone; the next one replaces it",
            f"rm {shlex.quote(str(path))}",
        )
        return Finding("sockets", str(path), "a dead daemon's", note=note, fix=fix)
    except DaemonError as error:
        return _unusable(path, error)
    return _rights(path, f"quantd {status['version']} answers, process {status['pid']}")


def _rights(path: Path, value: str) -> Finding:
    found = path.stat()
    told = f"{value}; {stat.filemode(found.st_mode)[1:]} {_user(found.st_uid)} {_group(found.st_gid)}"
    if found.st_mode & stat.S_IWOTH:
        return Finding(
            "sockets",
            str(path),
            told,
            fault="every user of this machine may use the daemon",
            fix=f"sudo chmod 0660 {shlex.quote(str(path))}",
        )
    return Finding("sockets", str(path), told)


def _unusable(path: Path, error: DaemonError) -> Finding:
    """A socket that is there and does not let us in, or a daemon that does not answer as one."""
    blocked = next((folder for folder in reversed(path.parents) if not os.access(folder, os.X_OK)), None)
    if blocked is None and os.access(path, os.W_OK):
        return Finding(
            "sockets", str(path), "does not answer as it should", fault=str(error), fix="quantd logs"
        )
    group = _group((blocked or path).stat().st_gid)
    user = pwd.getpwuid(os.getuid()).pw_name
    fault = f"{user} may not use it: only {_user((blocked or path).stat().st_uid)} and the group {group} may"
    if user in _members(group):
        return Finding(
            "sockets", str(path), "closed to us", fault=fault, fix=f"newgrp {group}, or log in again"
        )
    return Finding("sockets", str(path), "closed to us", fault=fault, fix=f"sudo usermod -aG {group} {user}")


def look_at_group(user: str | None = None, system_socket: Path = SYSTEM_SOCKET) -> Iterator[Finding]:
    """Whether we are in the group that may use the machine's daemon, where there is one."""
    if os.geteuid() == 0 or not system_socket.exists():
        return
    user = user or pwd.getpwuid(os.getuid()).pw_name
    try:
        entry = grp.getgrnam(GROUP)
    except KeyError:
        yield Finding(
            "sockets",
            f"group {GROUP}",
            "not there",
            fault="nobody but root may use the machine's daemon",
            fix="sudo quantd service install",
        )
        return
    if entry.gr_gid in os.getgroups():
        yield Finding("sockets", f"group {GROUP}", f"{user} is in it")
    elif user in entry.gr_mem:
        yield Finding(
            "sockets",
            f"group {GROUP}",
            f"{user} is in it from the next login on",
            fault="this session began before",
            fix=f"newgrp {GROUP}, or log in again",
        )
    else:
        yield Finding(
            "sockets",
            f"group {GROUP}",
            f"{user} is not in it",
            fault="the machine's daemon is closed to us",
            fix=f"sudo usermod -aG {GROUP} {user}",
        )


def look_at_port(own: Set[int], proc: Path = _PROC) -> Finding:
    """Who listens on the port that the configuration names. own: process ids of daemons that answer."""
    try:
        config = load_config({})
    except ConfigError:
        return Finding("ports", "tcp", "not known: the configuration cannot be read")
    if not config.port:
        return Finding("ports", "tcp", "off" if config.port is None else "any free one")
    name = f"{config.host}:{config.port}"
    inode = listening_inode(config.port, proc)
    if inode is None:
        return Finding("ports", name, "free")
    holder = holder_of(inode, proc)
    if holder is None:
        if own:
            return Finding("ports", name, "taken by a process that we cannot see into, maybe the daemon's")
        how = f"sudo ss -ltnp 'sport = :{config.port}'"
        fault = "a process that we cannot see into has the port"
        return Finding(
            "ports", name, "taken", fault=fault, fix=f"{how}  # then stop it, or use another --port"
        )
    pid, program = holder
    if pid in own or pid == 1 or program.startswith("systemd"):
        return Finding("ports", name, f"{program}, process {pid}")
    return Finding(
        "ports",
        name,
        f"{program}, process {pid}",
        fault=f"the port is taken by {program}, so a daemon cannot start there",
        fix=f"kill {pid}, or quantd serve --port {config.port + 1}",
    )


def listening_inode(port: int, proc: Path = _PROC) -> str | None:
    """The socket that listens on a TCP port of any address of ours; None where none does."""
    for name in ("tcp", "tcp6"):
        for line in (read_text(proc / "net" / name) or "").splitlines()[1:]:
            fields = line.split()
            address, _, hex_port = fields[1].rpartition(":")
            if fields[3] == _LISTENS and int(hex_port, 16) == port and _is_local(address):
                return fields[9]
    return None


def _is_local(address: str) -> bool:
    """Loopback or all addresses, in the kernel's spelling: hexadecimal, each four bytes in host order."""
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None) or found
    return bool(mapped.is_loopback or mapped.is_unspecified)


def holder_of(inode: str, proc: Path = _PROC) -> tuple[int, str] | None:
    """(process id, program) with this socket open, as far as we may see."""
    wanted = f"socket:[{inode}]"
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        if wanted in _open_files(folder / "fd"):
            return int(folder.name), read_text(folder / "comm") or "?"
    return None


def _open_files(folder: Path) -> Iterator[str]:
    """What the descriptors in a process's folder lead to, but for those that go meanwhile or are hidden."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                yield str(entry.readlink())


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _members(group: str) -> list[str]:
    try:
        return grp.getgrnam(group).gr_mem
    except KeyError:
        return []
