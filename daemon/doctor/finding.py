"""What a look at one thing gives: how it is, and where that is a fault, the way out of it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_INSTALLERS = {
    "debian": "sudo apt install",
    "ubuntu": "sudo apt install",
    "fedora": "sudo dnf install",
    "rhel": "sudo dnf install",
    "arch": "sudo pacman -S",
    "suse": "sudo zypper install",
    "alpine": "sudo apk add",
}


@dataclass(frozen=True)
class Finding:
    """section, name, value: what it is, in words. fault: what keeps quantd from working as it should.

    note: what could be better. fix: the command, or the step, that mends either.
    """

    section: str
    name: str
    value: str
    fault: str | None = None
    note: str | None = None
    fix: str | None = None


def install_command(package: str) -> str:
    """How this Linux installs a package."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return f"install {package}"
    kinds = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    installer = next((_INSTALLERS[kind] for kind in kinds if kind in _INSTALLERS), "install")
    return f"{installer} {package}"


def read_text(path: Path) -> str | None:
    """A file of the kernel's; None where there is none or it may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
