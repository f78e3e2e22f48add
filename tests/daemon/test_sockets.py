"""Case c33: what is in the way of a socket, and who may use it."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from quantd.daemon.errors import ListenError
from quantd.daemon.sockets import name_of, tcp_sockets, unix_socket


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_mode_is_0660_from_the_moment_of_bind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    umask = os.umask(0o022)
    bind = socket.socket.bind

    class Watching(socket.socket):
        def bind(self, address: object) -> None:
            bind(self, address)
            modes.append(stat.S_IMODE(Path(str(address)).stat().st_mode))

    monkeypatch.setattr(socket, "socket", Watching)
    try:
        with unix_socket(tmp_path / "new" / "api.sock") as listener:
            assert name_of(listener) == f"unix:{tmp_path}/new/api.sock"
        assert modes == [0o660]
        assert os.umask(umask) == 0o022
    finally:
        os.umask(umask)
    assert not (tmp_path / "new" / "api.sock").exists()


def test_the_file_is_given_to_the_group_that_may_use_it(tmp_path: Path) -> None:
    """Root may give it to any group, others to one of their own."""
    groups = (
        [group.gr_gid for group in grp.getgrall()] if os.geteuid() == 0 else [*os.getgroups(), os.getegid()]
    )
    gid = next((gid for gid in groups if gid != os.getegid()), os.getegid())
    with unix_socket(tmp_path / "api.sock", grp.getgrgid(gid).gr_name):
        status = (tmp_path / "api.sock").stat()
        assert status.st_gid == gid and stat.S_IMODE(status.st_mode) == 0o660
    with (
        pytest.raises(ListenError, match="no group 'no-such-group'"),
        unix_socket(tmp_path / "b", "no-such-group"),
    ):
        pass


def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    dead_socket(path)
    with unix_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with unix_socket(path):
        with pytest.raises(ListenError, match=f"{path}: another daemon"), unix_socket(path):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_the_file_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with unix_socket(path):
        path.rename(tmp_path / "old.sock")
        dead_socket(path)
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ListenError, match=str(path)), unix_socket(path):
        pass
    assert path.lstat()


def test_bad_places_are_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with pytest.raises(ListenError, match=f"{long}: too long"), unix_socket(long):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ListenError, match=r"file/api\.sock"), unix_socket(tmp_path / "file" / "api.sock"):
        pass


def test_a_busy_port_is_named() -> None:
    with tcp_sockets("127.0.0.1", 0) as (listener,):
        port = listener.getsockname()[1]
        assert name_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}"), tcp_sockets("127.0.0.1", port):
            pass
    with pytest.raises(ListenError, match=r"no\.such\.host"), tcp_sockets("no.such.host.invalid", 1):
        pass
