"""A program that can be pointed at a daemon: what it reads, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from quantd.daemon.connect.edit import ConfigFile
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders
from quantd.daemon.connect.probes import Probe

Files: TypeAlias = Callable[[Endpoint, UserFolders], Sequence[ConfigFile]]


def _no_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    return ()


def _no_variables(endpoint: Endpoint) -> Mapping[str, str]:
    return {}


def _no_steps(endpoint: Endpoint) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Tool:
    """A program. reads: where it finds its settings, in words. probes: the requests it makes.

    own_tokens: about how much of the context its instructions and tools take, where that is much.
    files, variables, steps: what it reads of files and of the environment, and what its user has to do by
    hand, with and without files.
    """

    name: str
    title: str
    reads: str
    probes: Sequence[Probe]
    own_tokens: int = 0
    files: Files = _no_files
    variables: Callable[[Endpoint], Mapping[str, str]] = _no_variables
    steps: Callable[[Endpoint], Sequence[str]] = _no_steps
