"""Which names of hosts, and which web pages, belong to this machine.

A page of any site can reach 127.0.0.1: through a name of its own that resolves there (DNS rebinding), or by a
request across sites. The first shows in Host, the second in Origin and Sec-Fetch-Site, which no page can set
(WHATWG Fetch, W3C Fetch Metadata).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from quantd.daemon.access.peers import is_loopback

# The machine under the names that containers on it have for it; no public name server knows these.
_CONTAINER_HOSTS = ("host.docker.internal", "host.containers.internal")
# Programs on the desktop that are made of web pages. Extensions of browsers are not among them.
_APP_SCHEMES = ("app", "file", "tauri", "vscode-file", "vscode-webview")


@dataclass(frozen=True)
class Sites:
    """hosts, origins: those that are allowed beside this machine's own; * stands for anything."""

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()

    def has_host(self, value: str) -> bool:
        """Whether a Host header, with or without a port, names this machine."""
        host = _host_of(f"http://{value}")
        return host is not None and (_is_local(host) or _matches(host, self.hosts))

    def has_origin(self, value: str) -> bool:
        """Whether a page of this Origin may ask; "null" never is one."""
        if _matches(value.lower(), self.origins):
            return True
        scheme, found, _ = value.partition("://")
        if found and scheme.lower() in _APP_SCHEMES:
            return True
        host = _host_of(value) if scheme.lower() in ("http", "https") else None
        return host is not None and _is_local(host)


def is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of this Origin is the daemon's own, which was asked for at this Host."""
    scheme, _, place = origin.lower().partition("://")
    return scheme in ("http", "https") and place == host.lower()


def _host_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # which raises for what is none
    except ValueError:
        return None
    plain = not (parts.path or parts.query or parts.fragment or parts.username is not None)
    return parts.hostname if plain else None


def _is_local(host: str) -> bool:
    name = host.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost") or name in _CONTAINER_HOSTS:
        return True
    try:
        return is_loopback(host) or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _matches(value: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(value, pattern.lower()) for pattern in patterns)
