"""Who may do what, as it can be set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.policy import Access, RequireKey
from quantd.daemon.access.sites import Sites
from quantd.daemon.settings import choice, file_path, names, setting, text

ADMIN_GROUP = "quantd-admin"


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """socket_group: None for that of the process. keys: None for the usual place."""

    socket_group: str | None = setting(text(), "Group that may use the Unix socket; else that of the daemon.")
    admin_group: str = setting(
        text(), "Group that may also change things, if there is one.", default=ADMIN_GROUP
    )
    require_key: RequireKey = setting(
        choice(get_args(RequireKey)),
        "Whether TCP needs a key: on loopback once there are keys, always, or never there.",
        default="auto",
    )
    keys: Path | None = setting(file_path(), "File of API keys.", env="QUANTD_KEYS")
    allow_hosts: tuple[str, ...] = setting(
        names(), "More names of this machine that a Host header may have.", default=()
    )
    allow_origins: tuple[str, ...] = setting(
        names(), "Web pages that may use the port, such as https://chat.example.", default=()
    )

    def access(self, state: Path) -> Access:
        """The rules. state: the folder where the keys are, unless they are elsewhere."""
        return Access(
            keys=self.key_file(state),
            owner=os.geteuid(),
            admin_group=self.admin_group,
            require_key=self.require_key,
            sites=Sites(self.allow_hosts, self.allow_origins),
        )

    def key_file(self, state: Path) -> KeyFile:
        """The keys."""
        return KeyFile(self.keys or state / "keys.json")
