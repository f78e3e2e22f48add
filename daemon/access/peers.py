"""The other end of a connection, as the kernel knows it."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

# struct ucred: pid, uid, gid (unix(7)).
_UCRED = struct.Struct("3i")

# sock_diag(7), linux/sock_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NO_COOKIE = 0xFFFFFFFF
_MESSAGE_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_INTERFACE_AND_COOKIE = struct.Struct("=III")
# What follows of the answer's inet_diag_msg behind its first 4 bytes and the socket's 48: expires, rqueue,
# wqueue, uid, inode.
_COUNTS = struct.Struct("=5I")
_COUNTS_AT = _MESSAGE_HEADER.size + 4 + 48
_ANSWER_SECONDS = 1.0


Socket: TypeAlias = "socket.socket | TransportSocket"


class Process(NamedTuple):
    """A process and its effective user."""

    pid: int
    uid: int


@dataclass(frozen=True)
class Connection:
    """A connection that a daemon has accepted."""

    socket: Socket

    @property
    def is_unix(self) -> bool:
        """Whether it came over a Unix socket."""
        return self.socket.family == socket.AF_UNIX

    @cached_property
    def is_loopback(self) -> bool:
        """Whether it came to an address that only this machine reaches."""
        return not self.is_unix and is_loopback(self.socket.getsockname()[0])

    @cached_property
    def process(self) -> Process | None:
        """What connected to the Unix socket; None for TCP."""
        return process_of(self.socket) if self.is_unix else None

    @cached_property
    def program(self) -> str | None:
        """What the kernel calls that process; None for one that is gone or out of sight."""
        if self.process is None:
            return None
        try:
            return Path(f"/proc/{self.process.pid}/comm").read_text(errors="replace").rstrip("\n")
        except OSError:
            return None

    @cached_property
    def uid(self) -> int | None:
        """The user at the other end; None where the kernel does not tell, as for other machines."""
        if self.process is not None:
            return self.process.uid
        try:
            return tcp_peer_uid(self.socket) if self.is_loopback else None
        except OSError:
            return None


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine reaches a listening socket."""
    return listener.family == socket.AF_UNIX or is_loopback(listener.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an IP address is this machine's own, also where it is IPv4 in IPv6's clothes."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def process_of(connection: Socket) -> Process:
    """What connected to a Unix socket, as it was at that moment."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Process(pid, uid)


def tcp_peer_uid(connection: Socket) -> int | None:
    """The owner of the socket at the other end of a TCP connection within this machine.

    None where there is no such socket any more: a closed one has no owner, which the kernel tells as uid 0.
    Raises OSError where the kernel cannot be asked.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(_ANSWER_SECONDS)
        channel.send(_peer_query(connection))
        answer = channel.recv(4096)
    _, kind, _, _, _ = _MESSAGE_HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return None
    _, _, _, uid, inode = _COUNTS.unpack_from(answer, _COUNTS_AT)
    return int(uid) if inode else None


def _peer_query(connection: Socket) -> bytes:
    """A message that asks for the socket whose local address is our peer's, and whose peer is ours."""
    family = connection.family
    local, peer = connection.getsockname(), connection.getpeername()
    addresses = b"".join(socket.inet_pton(family, end[0]).ljust(16, b"\0") for end in (peer, local))
    every_state = 0xFFF
    query = (
        _QUERY.pack(family, socket.IPPROTO_TCP, 0, every_state)
        + _PORTS.pack(peer[1], local[1])
        + addresses
        + _INTERFACE_AND_COOKIE.pack(0, _NO_COOKIE, _NO_COOKIE)
    )
    header = _MESSAGE_HEADER.pack(
        _MESSAGE_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0
    )
    return header + query


def is_member(uid: int, group: str) -> bool:
    """Whether a user is in a group of this machine; neither need exist."""
    import grp  # with pwd, which only some daemons need
    import pwd

    try:
        members, user = grp.getgrnam(group), pwd.getpwuid(uid)
    except KeyError:
        return False
    return user.pw_gid == members.gr_gid or user.pw_name in members.gr_mem
