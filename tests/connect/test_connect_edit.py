"""Files written and put back: bytes, modes, links, folders, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import json5
import pytest

from quantd.daemon.connect import files
from quantd.daemon.connect.edit import ConfigFile, Outcome, undo, write
from quantd.daemon.connect.journal import Journal
from quantd.daemon.connect.merge import Put
from quantd.daemon.errors import ConfigError

USER = '{\n  "theme": "dark", // mine\n  "api": {"url": "http://old", "key": "k"},\n}\n'
PUTS = (
    Put(("version",), 1, "frame"),
    Put(("api", "model"), "tiny"),
    Put(("provider",), "quantd", "choice", "choose quantd"),
    Put(("entry",), {"at": "now"}),
    Put(("entry", "saved"), "1970", "stamp"),
)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "state" / "connect")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "er" / "settings.json"


def put(path: Path, journal: Journal, *puts: Put, replace: bool = False) -> Outcome:
    return write("tool", [ConfigFile(path, "json", puts or PUTS)], journal, replace)[0]


def have(path: Path, text: str = USER) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("text", [USER, USER.replace("\n", "\r\n"), "", "{}", '{"a": 1}'])
def test_undo_gives_back_the_same_bytes(path: Path, journal: Journal, tmp_path: Path, text: str) -> None:
    have(path, text)
    outcome = put(path, journal)
    assert (outcome.done, outcome.backup) == ("written", path.with_name("settings.json.before-quantd-tool"))
    assert outcome.backup.read_bytes() == text.encode()
    assert json5.loads(path.read_text())["api"]["model"] == "tiny"
    assert ("\r\n" in text) == (b"\r\n" in path.read_bytes())
    assert undo("tool", journal)[0] == Outcome(path, "as it was")
    assert path.read_bytes() == text.encode()
    assert left(tmp_path) == ["deep/er/settings.json"]


def test_undo_takes_away_a_file_that_was_not_there_and_its_folders(
    path: Path, journal: Journal, tmp_path: Path
) -> None:
    assert put(path, journal).backup is None
    assert undo("tool", journal)[0].done.startswith("removed")
    assert left(tmp_path) == [] and not (tmp_path / "deep").exists()


def test_folders_that_hold_more_by_now_stay(path: Path, journal: Journal) -> None:
    put(path, journal)
    (path.parent / "other").touch()
    undo("tool", journal)
    assert left(path.parent) == ["other"]


def test_a_second_write_changes_nothing(path: Path, journal: Journal, tmp_path: Path) -> None:
    have(path)
    put(path, journal)
    before = {name: (tmp_path / name).read_bytes() for name in left(tmp_path)}
    stamp = path.stat().st_mtime_ns
    assert put(path, journal).done == "has it already"
    assert {name: (tmp_path / name).read_bytes() for name in left(tmp_path)} == before
    assert path.stat().st_mtime_ns == stamp
    undo("tool", journal)
    assert path.read_text() == USER


def test_other_values_leave_nothing_of_the_old_ones(path: Path, journal: Journal) -> None:
    have(path)
    put(path, journal, Put(("models", "tiny"), 1), Put(("a",), 1))
    put(path, journal, Put(("models", "big"), 2))
    assert json5.loads(path.read_text())["models"] == {"big": 2}
    assert "a" not in json5.loads(path.read_text())
    undo("tool", journal)
    assert path.read_text() == USER


def test_what_the_user_changed_since_stays(path: Path, journal: Journal) -> None:
    have(path)
    put(path, journal)
    path.write_text(
        path.read_text().replace('"dark", // mine', '"light", // changed').replace('"1970"', '"2026"')
    )
    put(path, journal, *PUTS[1:], Put(("more",), 1))
    assert "// changed" in path.read_text()
    path.write_text(path.read_text().replace('"quantd"', '"other"'))
    outcome = undo("tool", journal)[0]
    assert "what you changed since stays" in outcome.done and outcome.backup is not None
    after = json5.loads(path.read_text())
    # The frame stays, so does the user's choice; the stamp is gone with its entry.
    assert after == json5.loads(USER) | {"theme": "light", "version": 1, "provider": "other"}
    assert "// changed" in path.read_text()


def test_undo_is_refused_where_our_own_part_was_changed(path: Path, journal: Journal) -> None:
    have(path)
    put(path, journal)
    path.write_text(path.read_text().replace('"tiny"', '"mine"'))
    changed = path.read_bytes()
    with pytest.raises(
        ConfigError, match=r"settings\.json: changed since .*: api\.model; .*before-quantd-tool"
    ):
        undo("tool", journal)
    assert path.read_bytes() == changed
    with pytest.raises(ConfigError, match=r'api\.model is "mine" already; --replace makes it "tiny"'):
        put(path, journal)


def test_what_the_user_has_is_replaced_only_when_asked(path: Path, journal: Journal) -> None:
    have(path)
    theirs = Put(("api", "url"), "http://quantd")
    with pytest.raises(
        ConfigError, match=r'api\.url is "http://old" already; --replace makes it "http://quantd"'
    ):
        put(path, journal, theirs)
    assert path.read_text() == USER
    put(path, journal, theirs, replace=True)
    assert json5.loads(path.read_text())["api"] == {"url": "http://quantd", "key": "k"}
    path.write_text(path.read_text() + "// more\n")
    undo("tool", journal)
    assert path.read_text() == USER + "// more\n"


def test_a_choice_of_the_user_stands_and_is_told(path: Path, journal: Journal) -> None:
    have(path, '{"provider": "theirs", "version": 7}')
    assert put(path, journal).kept == ['provider stays "theirs": choose quantd']
    assert json.loads(path.read_text())["version"] == 7


def test_what_is_there_already_is_not_ours_to_take(path: Path, journal: Journal) -> None:
    have(path, '{"a": 1}')
    assert put(path, journal, Put(("a",), 1)).done == "has it already"
    with pytest.raises(ConfigError, match="nothing to undo"):
        undo("tool", journal)


def test_a_link_stays_a_link(path: Path, journal: Journal, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "zed.json"
    have(real)
    path.parent.mkdir(parents=True)
    path.symlink_to(real)
    put(path, journal)
    assert path.is_symlink() and "tiny" in real.read_text()
    assert left(real.parent) == ["zed.json"]
    undo("tool", journal)
    assert path.is_symlink() and real.read_text() == USER


def test_a_link_to_nothing_yet_gets_its_file_and_loses_it(
    path: Path, journal: Journal, tmp_path: Path
) -> None:
    real = tmp_path / "dotfiles" / "new" / "zed.json"
    path.parent.mkdir(parents=True)
    path.symlink_to(real)
    put(path, journal)
    assert path.is_symlink() and real.is_file()
    undo("tool", journal)
    assert path.is_symlink() and not (tmp_path / "dotfiles").exists()


def test_mode_is_kept_and_no_part_of_a_file_is_left(path: Path, journal: Journal) -> None:
    have(path)
    path.chmod(0o600)
    put(path, journal)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert left(path.parent) == ["settings.json", "settings.json.before-quantd-tool"]


def test_a_file_that_may_not_be_written_is_refused(
    path: Path, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(path)
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != path)
    with pytest.raises(ConfigError, match=r"settings\.json: cannot be written: .* is read-only for you"):
        put(path, journal)
    assert left(tmp_path) == ["deep/er/settings.json"] and path.read_text() == USER


def test_a_full_disk_leaves_the_file_as_it_was(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(path)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        put(path, journal)
    assert left(path.parent) == ["settings.json"] and path.read_text() == USER


def test_a_write_cut_short_can_be_undone(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(path)
    real = files.replace_file

    def die_at_the_file(target: Path, data: bytes) -> None:
        if target == path:
            raise KeyboardInterrupt
        real(target, data)

    monkeypatch.setattr("quantd.daemon.connect.edit.replace_file", die_at_the_file)
    with pytest.raises(KeyboardInterrupt):
        put(path, journal)
    monkeypatch.undo()
    undo("tool", journal)
    assert path.read_text() == USER


@pytest.mark.parametrize("text", ['{\n "a": 1\n "b": 2}', "\xff"])
def test_a_broken_file_is_refused_by_name(path: Path, journal: Journal, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"^{path}: (line 3: not valid JSON .*mend it first|is not UTF-8)"):
        put(path, journal)
    assert path.read_bytes() == text.encode("latin-1")


def test_all_files_or_none(path: Path, journal: Journal, tmp_path: Path) -> None:
    have(path, "{")
    good = ConfigFile(tmp_path / "good.json", "json", PUTS)
    with pytest.raises(ConfigError):
        write("tool", [good, ConfigFile(path, "json", PUTS)], journal, replace=False)
    assert left(tmp_path) == ["deep/er/settings.json"]


def test_a_file_that_would_hide_another_is_not_made(path: Path, journal: Journal) -> None:
    old = path.with_name("config.old")
    have(old)
    file = ConfigFile(path, "json", PUTS, instead_of=old)
    with pytest.raises(ConfigError, match=r"would be read in place of .*config\.old"):
        write("tool", [file], journal, replace=False)
    have(path)
    assert write("tool", [file], journal, replace=False)[0].done == "written"


def test_a_file_of_our_own_is_not_put_over_another(path: Path, journal: Journal) -> None:
    have(path, "theirs\n")
    own = ConfigFile(path, "own", [Put(("whole",), "ours\n")])
    with pytest.raises(ConfigError, match="--replace"):
        write("tool", [own], journal, replace=False)
    write("tool", [own], journal, replace=True)
    assert path.read_text() == "ours\n"
    undo("tool", journal)
    assert path.read_text() == "theirs\n"


def test_a_file_that_is_gone_by_now_is_told(path: Path, journal: Journal) -> None:
    have(path)
    put(path, journal)
    path.unlink()
    assert undo("tool", journal)[0].done == "is not there any more"


def test_a_lost_backup_is_no_loss(path: Path, journal: Journal) -> None:
    have(path)
    backup = put(path, journal).backup
    assert backup is not None
    backup.unlink()
    undo("tool", journal)
    assert json5.loads(path.read_text()) == json5.loads(USER) | {"version": 1}


def test_a_damaged_record_is_named(path: Path, journal: Journal, tmp_path: Path) -> None:
    have(tmp_path / "state" / "connect" / "tool.json", "[{}]")
    with pytest.raises(ConfigError, match=r"tool\.json: not a record"):
        put(path, journal)
