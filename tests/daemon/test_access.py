"""Who is let in, by rule: peers and requests without any socket."""

from __future__ import annotations

import grp
import os
import pwd
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.peers import Connection, is_loopback, is_member, process_of, tcp_peer_uid
from quantd.daemon.access.policy import Access, Asked
from quantd.daemon.access.scope import Scope
from quantd.daemon.access.sites import Sites, is_same_origin
from quantd.daemon.errors import (
    ForeignSiteError,
    KeyFileError,
    KeyNeededError,
    KeyNotFoundError,
    NotAllowedError,
)
from quantd.engine.errors import RequestError

OWNER, OTHER = 1000, 1001
ALL = (Scope.PUBLIC, Scope.INFER, Scope.ADMIN)


@dataclass(frozen=True)
class Peer:
    is_unix: bool
    is_loopback: bool
    uid: int | None


def unix(uid: int) -> Peer:
    return Peer(True, False, uid)


def loopback(uid: int | None) -> Peer:
    return Peer(False, True, uid)


REMOTE = Peer(False, False, None)
NOTHING = Asked()


def allowed(access: Access, peer: Peer, asked: Asked = NOTHING) -> list[Scope]:
    """What a request may be for."""
    found = []
    for scope in ALL:
        try:
            access.client(peer, asked, scope)
        except (ForeignSiteError, KeyNeededError, NotAllowedError):
            continue
        found.append(scope)
    return found


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "state" / "keys.json")


@pytest.mark.parametrize(
    ("peer", "scope"),
    [
        (unix(OWNER), Scope.ADMIN),
        (unix(0), Scope.ADMIN),
        (unix(OTHER), Scope.INFER),
        (loopback(OWNER), Scope.ADMIN),
        (loopback(OTHER), Scope.INFER),
        (loopback(0), Scope.INFER),  # proxies run as root
        (loopback(None), Scope.INFER),
        (REMOTE, Scope.PUBLIC),
    ],
)
def test_rights_without_any_key(keys: KeyFile, peer: Peer, scope: Scope) -> None:
    assert allowed(Access(keys, owner=OWNER), peer) == [right for right in ALL if right <= scope]


def test_members_of_the_admin_group_are_as_good_as_the_owner(keys: KeyFile) -> None:
    """By a primary group, which every machine has someone in."""
    user = pwd.getpwall()[-1]
    group = grp.getgrgid(user.pw_gid).gr_name
    access = Access(keys, owner=user.pw_uid + 1, admin_group=group)
    assert allowed(access, unix(user.pw_uid)) == allowed(access, loopback(user.pw_uid)) == list(ALL)
    assert is_member(user.pw_uid, group)
    assert not is_member(user.pw_uid, "no such group") and not is_member(2**31 - 9, group)


def test_keys_count_on_tcp(keys: KeyFile) -> None:
    access = Access(keys, owner=OWNER)
    infer, admin = Asked(keys=[keys.add("laptop")]), Asked(keys=["unused", keys.add("boss", "admin")])
    for peer in (REMOTE, loopback(OWNER), loopback(OTHER)):
        assert allowed(access, peer) == allowed(access, peer, Asked(keys=["unused"])) == [Scope.PUBLIC]
        assert allowed(access, peer, infer) == [Scope.PUBLIC, Scope.INFER]
        assert allowed(access, peer, admin) == list(ALL)
        assert access.client(peer, infer, Scope.INFER).id == "key:laptop"
    assert allowed(access, unix(OTHER), admin) == [Scope.PUBLIC, Scope.INFER]
    keys.remove("laptop")
    with pytest.raises(KeyNeededError, match="no longer"):
        access.client(REMOTE, infer, Scope.INFER)


def test_whether_loopback_needs_a_key(keys: KeyFile) -> None:
    for require, without, with_some in (("auto", 3, 1), ("always", 1, 1), ("remote", 3, 3)):
        access = Access(KeyFile(keys.path), owner=OWNER, require_key=require)  # type: ignore[arg-type]
        assert len(allowed(access, loopback(OWNER))) == without
        keys.add("a")
        assert len(allowed(access, loopback(OWNER))) == with_some
        assert len(allowed(access, REMOTE)) == 1
        keys.remove("a")


def test_who_speaks_for_others_changes_nothing(keys: KeyFile) -> None:
    access = Access(keys, owner=OWNER)
    host = "127.0.0.1:11435"
    for asked, scope in (
        (Asked(host=host), Scope.ADMIN),
        (Asked(host=host, origin="http://127.0.0.1:11435"), Scope.ADMIN),
        (Asked(host=host, fetch_site="same-origin"), Scope.ADMIN),
        (Asked(host=host, fetch_site="none"), Scope.ADMIN),
        (Asked(host=host, origin="http://127.0.0.1:3000"), Scope.INFER),
        (Asked(host=host, origin="vscode-webview://x"), Scope.INFER),
        (Asked(host=host, fetch_site="same-site"), Scope.INFER),
        (Asked(host=host, is_forwarded=True), Scope.INFER),
        (Asked(host=host, fetch_site="cross-site"), Scope.PUBLIC),
    ):
        assert allowed(access, loopback(OWNER), asked)[-1] is scope, asked
    assert allowed(access, loopback(OWNER), Asked(host="evil.example")) == []


def test_a_key_speaks_for_itself_whatever_the_page(keys: KeyFile) -> None:
    access = Access(keys, owner=OWNER)
    asked = Asked(host="llm.example", origin="https://chat.example", keys=[keys.add("chat")])
    assert allowed(access, loopback(OTHER), asked) == allowed(access, REMOTE, asked) == [0, 1]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "localhost.",
        "api.localhost:80",
        "127.0.0.1:11435",
        "127.9.9.9",
        "[::1]:80",
        "[::ffff:127.0.0.1]:80",
        "0.0.0.0:11435",
        "host.docker.internal:11435",
        "box.lan:11435",
        "a.corp.example",
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert Sites(hosts=["box.lan", "*.corp.example"]).has_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "notlocalhost",
        "evil.example:80@127.0.0.1",
        "127.0.0.1@evil.example",
        "127.0.0.1#.evil.example",
        "127.0.0.1:x",
        "[::1",
        "10.0.0.1",
        "2130706433",
        "box.lan.evil.example",
        "corp.example",
    ],
)
def test_names_of_others(host: str) -> None:
    assert not Sites(hosts=["box.lan", "*.corp.example"]).has_host(host)


SITES = Sites(origins=["https://chat.example", "chrome-extension://abc", "https://*.corp.example:8443"])


@pytest.mark.parametrize(
    ("origin", "may"),
    [
        ("http://localhost:3000", True),
        ("https://localhost", True),
        ("http://[::1]:80", True),
        ("vscode-webview://1a2b", True),
        ("app://obsidian.md", True),
        ("tauri://localhost", True),
        ("https://chat.example", True),
        ("https://a.corp.example:8443", True),
        ("chrome-extension://abc", True),
        ("chrome-extension://other", False),
        ("moz-extension://abc", False),
        ("http://chat.example", False),
        ("https://chat.example:444", False),
        ("https://chat.example.evil.example", False),
        ("https://evil.example", False),
        ("https://localhost.evil.example", False),
        ("https://localhost@evil.example", False),
        ("null", False),
        ("", False),
        ("localhost", False),
        ("javascript://localhost", False),
    ],
)
def test_origins(origin: str, may: bool) -> None:
    assert SITES.has_origin(origin) is may
    assert Sites(origins=["*"]).has_origin(origin)


def test_the_daemons_own_page() -> None:
    assert is_same_origin("http://localhost:11435", "localhost:11435")
    assert is_same_origin("https://LLM.example", "llm.example")
    for origin, host in (("http://localhost:80", "localhost"), ("null", "null"), ("app://x", "x")):
        assert not is_same_origin(origin, host)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1", False),
    ],
)
def test_addresses_that_only_this_machine_reaches(address: str, local: bool) -> None:
    assert is_loopback(address) is local


def test_the_kernel_tells_who_is_at_the_other_end_of_a_pair() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert process_of(one) == (os.getpid(), os.geteuid())
        connection = Connection(one)
        assert connection.uid == os.geteuid() and connection.is_unix and not connection.is_loopback
        assert connection.program == Path("/proc/self/comm").read_text().rstrip("\n")


@pytest.fixture(params=[("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection: the client's, the daemon's."""
    address, target = request.param
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    both = address == "::"
    with socket.create_server((address, 0), family=family, dualstack_ipv6=both) as listener:
        client = socket.create_connection((target, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with client, accepted:
            yield client, accepted


def test_the_kernel_tells_who_is_at_the_other_end_of_loopback(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    connection = Connection(accepted)
    assert connection.is_loopback and connection.uid == os.geteuid()
    client.shutdown(socket.SHUT_WR)
    assert tcp_peer_uid(accepted) == os.geteuid()


def test_a_client_that_is_gone_is_nobody_and_not_root(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    client.close()
    assert tcp_peer_uid(accepted) is None
    assert Connection(accepted).uid is None


def test_keys_are_kept_as_hashes_in_a_private_file(keys: KeyFile) -> None:
    assert keys.all() == () and keys.find("x") is None
    text = keys.add("laptop")
    assert len(text) >= 43 and text not in keys.path.read_text()
    assert keys.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in keys.path.parent.iterdir()] == ["keys.json"]
    assert keys.add("boss", "admin") != text
    found = keys.find(text)
    assert found is not None and (found.name, found.allows) == ("laptop", Scope.INFER)
    for wrong in ("", text[:-1], text + "x", text.upper(), found.sha256, "é", "\udcff"):
        assert keys.find(wrong) is None


def test_a_changed_file_counts_at_once(keys: KeyFile) -> None:
    text = keys.add("a")
    assert keys.find(text)
    KeyFile(keys.path).remove("a")
    assert keys.find(text) is None
    other = KeyFile(keys.path).add("b")
    assert keys.find(other)
    keys.path.unlink()
    assert keys.find(other) is None


def test_names_of_keys(keys: KeyFile) -> None:
    keys.add("a.b-c_D9")
    for name in ("", " ", "a/b", "../a", "é", "x" * 65, "a b", ".a", "a\n"):
        with pytest.raises(RequestError, match="no name for a key"):
            keys.add(name)
    with pytest.raises(RequestError, match="already"):
        keys.add("a.b-c_D9")
    with pytest.raises(KeyNotFoundError, match="nosuch"):
        keys.remove("nosuch")


def test_a_file_that_cannot_be_trusted_lets_nobody_in(keys: KeyFile) -> None:
    text = keys.add("a", "admin")
    good = keys.path.read_bytes()
    access = Access(keys, owner=OWNER)
    for spoil in (
        lambda: keys.path.write_text("{"),
        lambda: keys.path.write_text('{"keys": [{"name": "x"}]}'),
        lambda: keys.path.chmod(0o622),
    ):
        spoil()
        for asked in (Asked(keys=[text]), Asked()):
            with pytest.raises(KeyFileError, match=r"keys\.json"):
                access.client(loopback(OWNER), asked, Scope.INFER)
        assert allowed(access, unix(OWNER)) == list(ALL)
        keys.path.write_bytes(good)
        keys.path.chmod(0o600)
        assert allowed(access, loopback(OWNER), Asked(keys=[text])) == list(ALL)
