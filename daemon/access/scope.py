"""Who asks, and what a route needs one to be allowed."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Scope(enum.IntEnum):
    """What a route needs; each holds those before it.

    PUBLIC: that a daemon is here, and its page, which holds nothing. INFER: models, answers, and how it is
    going. ADMIN: what is on disk and in memory, keys, the daemon's end.
    """

    PUBLIC = 0
    INFER = 1
    ADMIN = 2


@dataclass(frozen=True)
class Client:
    """A user of this machine, or the holder of a key.

    id: tells clients apart wherever something is kept or counted for them: "uid:1000", "key:laptop". Where
    the kernel cannot tell users of a loopback port apart they are one, "loopback". Who asks from elsewhere,
    without a key, for what needs none is "anyone".
    """

    id: str

    @property
    def file_name(self) -> str:
        """The id as a plain name of a file or folder."""
        return self.id.replace(":", "-")
