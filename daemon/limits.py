"""What clients may take of a daemon, each and all together."""

from __future__ import annotations

from dataclasses import dataclass

from quantd.daemon.settings import duration, setting, size, whole


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one request, of one connection, and of all of them."""

    max_body: int = setting(size(), "Most bytes of a request's body, decompressed.", default=64 * 2**20)
    max_header: int = setting(
        size(1024), "Most bytes of a request line, or of one header.", default=16 * 2**10
    )
    max_connections: int = setting(whole(1), "Most connections; further ones are refused.", default=512)
    max_queue: int = setting(whole(1), "Most requests in the daemon; further ones are refused.", default=512)
    max_client_queue: int = setting(whole(1), "Most of those of one client.", default=256)
    idle_timeout: float = setting(
        duration(), "How long a connection may take to send the head of a request.", default=75.0
    )
    read_timeout: float = setting(
        duration(), "How long a body may take to come, beside a second for each 64 KiB.", default=30.0
    )
    write_timeout: float = setting(
        duration(), "How long a client may leave what it is sent unread.", default=60.0
    )


DEFAULT_LIMITS = Limits()
