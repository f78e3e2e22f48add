"""The rules: who a client is, and what it may do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quantd.daemon.access.keys import Key, KeyFile
from quantd.daemon.access.peers import is_member
from quantd.daemon.access.scope import Client, Scope
from quantd.daemon.access.sites import Sites, is_same_origin
from quantd.daemon.errors import ForeignSiteError, KeyNeededError, NotAllowedError

RequireKey = Literal["auto", "always", "remote"]


class Peer(Protocol):
    """The other end of a connection (see quantd.daemon.access.peers.Connection)."""

    @property
    def is_unix(self) -> bool: ...

    @property
    def is_loopback(self) -> bool: ...

    @property
    def uid(self) -> int | None: ...


@dataclass(frozen=True)
class Asked:
    """What a request says of where it comes from. keys: those it brings.

    is_forwarded: a proxy brings it, maybe for someone else. fetch_site: the header Sec-Fetch-Site.
    """

    host: str | None = None
    origin: str | None = None
    fetch_site: str | None = None
    keys: Sequence[str] = ()
    is_forwarded: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether its sender speaks for itself: no proxy, and no web page but the daemon's own."""
        if self.is_forwarded:
            return False
        if self.origin is not None:
            return self.host is not None and is_same_origin(self.origin, self.host)
        return self.fetch_site in (None, "none", "same-origin")


@dataclass(frozen=True)
class Access:
    """owner: the user whose daemon this is.

    admin_group: its members may do what the owner may. require_key: for TCP: "auto", on every address as soon
    as there are keys; "always"; "remote", never on loopback.
    """

    keys: KeyFile
    owner: int = field(default_factory=os.geteuid)
    admin_group: str | None = None
    require_key: RequireKey = "auto"
    sites: Sites = field(default_factory=Sites)

    def client(self, peer: Peer, asked: Asked, needed: Scope) -> Client:
        """Who asks for something that needs this scope.

        Raises ForeignSiteError, KeyNeededError, NotAllowedError, KeyFileError. On a Unix socket the kernel
        says who it is, and headers count for nothing: no web page gets there. On TCP it is a key, or, on
        loopback, the user.
        """
        if peer.is_unix:
            return _allowed(_user(peer), needed, lambda: peer.uid == 0 or self._is_admin(peer.uid))
        if (key := self._key(asked)) is not None:
            return _allowed(Client(f"key:{key.name}"), needed, lambda: key.allows is Scope.ADMIN)
        if peer.is_loopback:
            self._check_site(asked, needed)
        if needed > Scope.PUBLIC and self._needs_key(peer):
            raise KeyNeededError(_UNKNOWN_KEY if asked.keys else _NO_KEY)
        return _allowed(_user(peer), needed, lambda: asked.is_direct and self._is_admin(peer.uid))

    def has_keys(self) -> bool:
        """Whether there is any key. Raises KeyFileError."""
        return bool(self.keys.all())

    def _key(self, asked: Asked) -> Key | None:
        return next(filter(None, map(self.keys.find, asked.keys)), None)

    def _needs_key(self, peer: Peer) -> bool:
        if not peer.is_loopback or self.require_key == "always":
            return True
        return self.require_key == "auto" and self.has_keys()

    def _is_admin(self, uid: int | None) -> bool:
        """Whether a user is the owner or as good. Root is, where only root itself can come as root."""
        if uid is None:
            return False
        return uid == self.owner or (self.admin_group is not None and is_member(uid, self.admin_group))

    def _check_site(self, asked: Asked, needed: Scope) -> None:
        if asked.host is not None and not self.sites.has_host(asked.host):
            raise ForeignSiteError(f"Host {asked.host[:100]!r} is not this machine; allow_hosts can name it")
        if asked.origin is not None and not self.sites.has_origin(asked.origin):
            raise ForeignSiteError(f"Origin {asked.origin[:100]!r} is not allowed; allow_origins can name it")
        if asked.origin is None and asked.fetch_site == "cross-site" and needed > Scope.PUBLIC:
            raise ForeignSiteError("a page of another site asks, without saying which")


def _user(peer: Peer) -> Client:
    if peer.uid is not None:
        return Client(f"uid:{peer.uid}")
    return Client("loopback" if peer.is_loopback else "anyone")


def _allowed(client: Client, needed: Scope, is_admin: Callable[[], bool]) -> Client:
    if needed is Scope.ADMIN and not is_admin():
        raise NotAllowedError(f"{client.id} {_NOT_ALLOWED}")
    return client


_NO_KEY = (
    "an API key is needed: send it as Authorization: Bearer KEY or as x-api-key (quantd's own commands take "
    "it from QUANTD_KEY); quantd key add makes one"
)
_UNKNOWN_KEY = "this is not, or no longer, an API key of this daemon; quantd key ls shows those that are"
_NOT_ALLOWED = (
    "may use models, but not change what is on disk or in memory: that is for the daemon's owner, members of "
    "its admin group, root over the Unix socket, and API keys made with --scope admin; not for proxies, nor "
    "for web pages but the daemon's own"
)
