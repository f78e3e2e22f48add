"""Where the programs of one user keep their configuration, on Linux."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class UserFolders:
    """Folders by the variables that programs look at. Relative values of them do not count."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.home = Path(env.get("HOME") or Path.home())

    @property
    def config(self) -> Path:
        """Of programs that follow the XDG base directories (freedesktop.org, 0.8)."""
        return self.named_by("XDG_CONFIG_HOME", ".config")

    @property
    def vscode(self) -> Path:
        """The user's folder of VS Code, or of a build of it that is used in its place."""
        names = ("Code", "Code - Insiders", "VSCodium", "Code - OSS")
        return first_there(*(self.config / name / "User" for name in names))

    def named_by(self, variable: str, default: str) -> Path:
        """The folder that a variable names, else one below the home."""
        value = Path(self._env.get(variable, ""))
        return value if value.is_absolute() else self.home / default


def first_there(*paths: Path) -> Path:
    """The first path that exists, or the first."""
    return next((path for path in paths if path.exists()), paths[0])
