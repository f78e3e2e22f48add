"""The daemon's units: where systemd looks for them, and putting them there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from quantd.daemon.errors import ServiceError

_EXECUTABLE = re.compile(r"(?:(?<=^ExecStart=)|(?<=^ExecStop=))\S+", re.MULTILINE)
NAMES = ("quantd.service", "quantd.socket")
# A user's manager does not know when the machine sleeps.
SLEEP = "quantd-sleep.service"
# What else the machine needs: the folder where a file of ours goes, and what then reads it.
_SETTINGS = (
    ("etc/sysusers.d", ("systemd-sysusers",)),
    ("etc/tmpfiles.d", ("systemd-tmpfiles", "--create")),
)
# What the system's unit cannot see; see ProtectHome= in systemd.exec(5).
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"))


@dataclass(frozen=True)
class Units:
    """A manager's units. folder: where they go. root: of the machine's folders."""

    user: bool
    folder: Path
    root: Path = Path("/")

    @classmethod
    def of_user(cls, config_home: Path) -> Units:
        """Of the manager that each user has. config_home: the base folder of settings."""
        return cls(True, config_home / "systemd" / "user")

    @classmethod
    def of_system(cls, root: Path = Path("/")) -> Units:
        """Of the machine."""
        return cls(False, root / "etc/systemd/system", root)

    @property
    def names(self) -> tuple[str, ...]:
        """The units."""
        return NAMES if self.user else (*NAMES, SLEEP)

    def install(self, executable: Path) -> list[Path]:
        """Write the units, to start `executable`, and have the manager listen; the files written.

        Raises ServiceError for an executable that the unit could not reach, and with the manager's reason;
        without a manager nothing is written.
        """
        self._check_reachable(executable)
        self.control("show", "--property=Version")
        written = dict(self._files(executable))
        for path, text in written.items():
            _write(path, text)
        for path, command in self._settings().items():
            _run(*command, str(path))
        self.control("daemon-reload")
        self.control("enable", "--now", "quantd.socket")
        if not self.user:
            self.control("enable", SLEEP)
        return list(written)

    def uninstall(self) -> list[Path]:
        """End the daemon, its sockets and its units; the files removed. Models stay. Raises ServiceError."""
        there = [path for path in (self.folder / name for name in self.names) if path.exists()]
        if not there:
            raise ServiceError(f"no units of quantd are in {self.folder}")
        self.control("disable", "--now", *(path.name for path in there))
        there += [path for path in self._settings() if path.exists()]
        for path in there:
            path.unlink()
        self.control("daemon-reload")
        return there

    def control(self, *arguments: str) -> str:
        """What systemctl says. Raises ServiceError with its reason."""
        return _run("systemctl", *(["--user"] if self.user else []), *arguments)

    def _files(self, executable: Path) -> Iterator[tuple[Path, str]]:
        source = files("quantd.systemd")
        for path in self._settings():
            yield path, (source / f"{path.parent.name.removesuffix('.d')}.conf").read_text()
        for name in self.names:
            text = (source / "user" / name if self.user else source / name).read_text()
            yield (
                self.folder / name,
                _EXECUTABLE.sub(str(executable), text),
            )

    def _settings(self) -> Mapping[Path, Sequence[str]]:
        """Files of the machine beside its units, and the commands that then read them."""
        places = () if self.user else _SETTINGS
        return {self.root / folder / "quantd.conf": command for folder, command in places}

    def _check_reachable(self, executable: Path) -> None:
        if re.search(r"[\s%$\"'\\]", str(executable)):
            raise ServiceError(f"{executable}: a unit cannot name this path; install quantd in a plainer one")
        hidden = [folder for folder in _HIDDEN if executable.resolve().is_relative_to(folder)]
        if hidden and not self.user:
            raise ServiceError(
                f"{executable}: the system's unit sees nothing below {hidden[0]}; install quantd elsewhere, "
                "such as in /opt/quantd, or use --user"
            )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ServiceError(f"{path}: cannot be written: {error.strerror}") from error


def _run(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        raise ServiceError(f"{program} is not here: this machine does not run systemd")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise ServiceError(f"{program} {' '.join(arguments)}: {reason}")
    return done.stdout


def properties(text: str) -> Mapping[str, str]:
    """What `systemctl show` prints, KEY=VALUE a line."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key: value for key, _, value in pairs}
