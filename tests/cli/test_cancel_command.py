"""`quantd cancel`: which requests it ends, and what it says where that is not clear."""

from __future__ import annotations

import json

from fake_daemon import STATUS, FakeDaemon, Quantd, request


def test_without_an_id_it_lists_what_is_under_way(fake_daemon: FakeDaemon, quantd: Quantd) -> None:
    socket = ("--socket", str(fake_daemon.socket))
    header, *rows = [line.split() for line in quantd("cancel", *socket).stdout.splitlines()]
    assert header == ["ID", "CLIENT", "REQUEST", "MODEL", "DOES", "OUT", "TIME"]
    assert rows[0] == ["req_zed", "zed", "/v1/chat/completions", "tiny", "decode", "41", "12", "s"]
    assert len(rows) == 3 and fake_daemon.cancelled == []
    listed = json.loads(quantd("cancel", "--json", *socket).stdout)
    assert [entry["id"] for entry in listed] == ["req_zed", "req_aider", "req_vim"]
    fake_daemon.status = STATUS | {"requests": []}
    assert quantd("cancel", *socket).stdout == "No request is under way.\n"


def test_ids_and_their_beginnings_are_cancelled_once_each(fake_daemon: FakeDaemon, quantd: Quantd) -> None:
    done = quantd("cancel", "req_z", "req_vim", "req_zed", "--socket", str(fake_daemon.socket))
    assert (done.returncode, done.stdout) == (0, "Cancelled: req_zed, req_vim\n"), done.stderr
    assert fake_daemon.cancelled == ["req_zed", "req_vim"]


def test_an_id_is_itself_before_it_is_a_beginning(fake_daemon: FakeDaemon, quantd: Quantd) -> None:
    names = ("a", "ab")
    fake_daemon.status = STATUS | {"requests": [request(name, "POST /infill", "decode") for name in names]}
    assert quantd("cancel", "req_a", "--socket", str(fake_daemon.socket)).returncode == 0
    assert fake_daemon.cancelled == ["req_a"]


def test_nothing_is_cancelled_where_one_id_is_unclear(fake_daemon: FakeDaemon, quantd: Quantd) -> None:
    socket = ("--socket", str(fake_daemon.socket))
    unknown = quantd("cancel", "req_zed", "nosuch", *socket)
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "Error: no request 'nosuch' is under way; quantd cancel lists those that are\n",
    )
    several = quantd("cancel", "req_zed", "req_", *socket)
    assert several.returncode == 1 and "3 requests begin with 'req_': req_zed, req_aider" in several.stderr
    empty = quantd("cancel", "", *socket)
    assert empty.returncode == 1 and fake_daemon.cancelled == []


def test_all_passes_over_what_has_just_ended(fake_daemon: FakeDaemon, quantd: Quantd) -> None:
    names = ("one", "ended", "two")
    fake_daemon.status = STATUS | {"requests": [request(name, "POST /infill", "decode") for name in names]}
    socket = ("--socket", str(fake_daemon.socket))
    assert json.loads(quantd("cancel", "--all", "--json", *socket).stdout) == {
        "cancelled": ["req_one", "req_two"]
    }
    named = quantd("cancel", "req_ended", *socket)
    assert named.returncode == 1 and "no request 'req_ended' is under way" in named.stderr
    fake_daemon.status = STATUS | {"requests": []}
    assert quantd("cancel", "--all", *socket).stdout == "Cancelled nothing: no request is under way.\n"
