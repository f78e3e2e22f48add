"""One setting: its name, what values it takes, and how they are written in flags, variables and TOML.

A configuration record is a frozen dataclass whose fields are made by `setting`; the command line, the
file reader and the reference in the README all follow from those fields.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quantd.daemon.durations import parse_duration
from quantd.daemon.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to write values. `parse` raises ValueError for what it does not take; `accepts` tells users."""

    metavar: str
    accepts: str
    parse: Callable[[object], object]

    @property
    def is_switch(self) -> bool:
        """Whether a flag without a value says it."""
        return not self.metavar


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a configuration record. `env`: the variable that sets it too, if any."""

    name: str
    kind: Kind
    help: str
    env: str | None
    default: object

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--" + self.name.replace("_", "-")

    def parse(self, value: object, source: str) -> object:
        """The parsed value. Raises ConfigError naming `source`, the place where the value was written."""
        try:
            return self.kind.parse(value)
        except ValueError:
            raise ConfigError(f"{source}: {value!r} is not accepted; use {self.kind.accepts}") from None


def setting(
    kind: Kind,
    help: str,
    *,
    default: object = None,
    default_factory: Callable[[], object] | None = None,
    env: str | None = None,
) -> Any:
    """A dataclass field that can be set from outside."""
    metadata = {"kind": kind, "help": help, "env": env}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def setting_like(record: type[msgspec.Struct], name: str, kind: Kind, help: str) -> Any:
    """A setting for the field `name` of another record, with the default that it has there."""
    fields = {field.name: field for field in msgspec.structs.fields(record)}
    return setting(kind, help, default=fields[name].default)


def settings_of(record: type[Any]) -> dict[str, Setting]:
    """The settings of a configuration record by name, in order; default is None where it is computed."""
    return {
        field.name: Setting(
            field.name,
            default=None if field.default is dataclasses.MISSING else field.default,
            **field.metadata,
        )
        for field in dataclasses.fields(record)
        if "kind" in field.metadata
    }


def choice(values: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> Kind:
    """One of `values`, or one of the names that others use for them."""
    aliases = aliases or {}
    also = "".join(f", {alias} (= {value})" for alias, value in aliases.items())

    def parse(value: object) -> object:
        name = aliases.get(str(value).lower(), str(value).lower())
        if name not in values:
            raise ValueError(value)
        return name

    return Kind("|".join(values), "one of " + ", ".join(values) + also, parse)


def whole(low: int, high: int = 2**31 - 1) -> Kind:
    """A whole number in a closed range."""

    def parse(value: object) -> object:
        number = int(str(_plain(value)))
        if not low <= number <= high:
            raise ValueError(value)
        return number

    most = "" if high == 2**31 - 1 else f" to {high}"
    return Kind("N", f"a whole number from {low}{most}", parse)


def tcp_port() -> Kind:
    """A TCP port; 0 for any free one, "off" for none."""
    number = whole(0, 65535)
    return Kind(
        "PORT", '0 to 65535 (0: any free one), or "off"', lambda value: _unless_off(value, number.parse)
    )


def path_or_off() -> Kind:
    """A path, made absolute; "off" for none."""
    return Kind("PATH", 'a path, or "off"', lambda value: _unless_off(value, _path))


def file_path() -> Kind:
    """The path of a file, made absolute."""
    return Kind("PATH", "a path", _path)


def names() -> Kind:
    """A list of names: in one text with commas, or in the file as a list too."""

    def parse(value: object) -> object:
        found = value.split(",") if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise ValueError(value)
        return tuple(item.strip() for item in found if item.strip())

    return Kind("A,B,...", "names with commas between them", parse)


def seconds() -> Kind:
    """A time of at least 0 seconds."""

    def parse(value: object) -> object:
        number = float(_plain(value))
        if not 0 <= number < math.inf:
            raise ValueError(value)
        return number

    return Kind("SECONDS", "a number of seconds from 0", parse)


def duration() -> Kind:
    """A time as `parse_duration` reads it."""
    return Kind(
        "TIME",
        "seconds, or a time such as 15m or 1h30m; -1 for ever",
        lambda value: parse_duration(_plain(value)),
    )


def text() -> Kind:
    """Any text that is not empty."""

    def parse(value: object) -> object:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(value)
        return value

    return Kind("TEXT", "a text that is not empty", parse)


def switch() -> Kind:
    """On or off."""
    words = {"true": True, "on": True, "false": False, "off": False}

    def parse(value: object) -> object:
        if str(value).lower() not in words:
            raise ValueError(value)
        return words[str(value).lower()]

    return Kind("", "true or false", parse)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(ib|b)?|b)?", re.IGNORECASE)


def size(low: int = 1) -> Kind:
    """A number of bytes, from `low`. As elsewhere on a desktop, G and GiB are 2**30 bytes and GB is 10**9."""

    def parse(value: object) -> object:
        match = _SIZE.fullmatch(str(_plain(value)).strip())
        if match is None:
            raise ValueError(value)
        number, prefix, suffix = match.groups()
        base = 1000 if (suffix or "").lower() == "b" else 1024
        num_bytes = int(float(number) * base ** (" kmgt".index(prefix.lower()) if prefix else 0))
        if num_bytes < low:
            raise ValueError(value)
        return num_bytes

    return Kind("SIZE", "bytes, or a size such as 512MiB or 2G", parse)


def _plain(value: object) -> str | int | float:
    """A number or text as it is; TOML's true is no number, though Python's is."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    return value


def _unless_off(value: object, parse: Callable[[object], object]) -> object:
    return None if value is False or value == "off" else parse(value)


def _path(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(value)
    return Path(value).expanduser().absolute()
