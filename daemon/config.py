"""Where quantd keeps things and how a daemon runs: flags, variables and TOML from one set of records.

The only place that reads the environment. A value is taken from the command line, else from a variable,
else from the file, else from the record's default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from quantd.daemon.access.options import AccessOptions
from quantd.daemon.errors import ConfigError
from quantd.daemon.limits import Limits
from quantd.daemon.settings import (
    Kind,
    Setting,
    choice,
    duration,
    names,
    path_or_off,
    seconds,
    setting,
    setting_like,
    settings_of,
    size,
    switch,
    tcp_port,
    text,
    whole,
)
from quantd.daemon.supervision import Supervision
from quantd.engine.config import Activations, Backend, EngineConfig, KVDtype
from quantd.engine.split import parse_split

SYSTEM_SOCKET = Path("/run/quantd/api.sock")
DEFAULT_PORT = 11435

# The names that llama.cpp and Ollama give to the same cache formats.
_KV_ALIASES = {"q8_0": "int8", "f16": "fp16", "f32": "fp32"}


def _split(value: object) -> object:
    parse_split(str(value))
    return str(value)


_SPLIT = Kind("auto|A,B,...", "auto, or shares such as 3,1", _split)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paths:
    """The folders of one user's quantd, and the Unix socket of its daemon. None of them need exist yet."""

    models: Path
    cache: Path
    state: Path
    socket: Path
    config: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, uid: int | None = None) -> Paths:
        """All under $QUANTD_HOME if that is set, else in the XDG base directories (freedesktop.org, 0.8).

        Root has no session of its own, so its socket is the system's, `/run/quantd/api.sock`.
        """
        env = os.environ if env is None else env
        if home := env.get("QUANTD_HOME"):
            return cls._under(Path(home).expanduser().absolute())
        data, state = _xdg(env, "XDG_DATA_HOME", ".local/share"), _xdg(env, "XDG_STATE_HOME", ".local/state")
        return cls(
            models=data / "models",
            cache=_xdg(env, "XDG_CACHE_HOME", ".cache"),
            state=state,
            socket=_default_socket(env, os.geteuid() if uid is None else uid, state),
            config=_xdg(env, "XDG_CONFIG_HOME", ".config") / "quantd.toml",
        )

    @classmethod
    def _under(cls, home: Path) -> Paths:
        return cls(
            models=home / "models",
            cache=home / "cache",
            state=home / "state",
            socket=home / "run" / "api.sock",
            config=home / "quantd.toml",
        )

    @property
    def kernels(self) -> Path:
        """The folder of the kernels compiled on this machine."""
        return self.cache / "kernels"

    @property
    def prefixes(self) -> Path:
        """The folder of the prefix cache's part on disk."""
        return self.cache / "prefixes"

    @property
    def log(self) -> Path:
        """The log file of daemons that the command line starts by itself."""
        return self.state / "daemon.log"

    @property
    def requests(self) -> Path:
        """The log of requests."""
        return self.state / "requests.jsonl"


def config_home(env: Mapping[str, str] | None = None) -> Path:
    """The base directory of a user's settings."""
    return _xdg(os.environ if env is None else env, "XDG_CONFIG_HOME", ".config").parent


def has_display() -> bool:
    """Whether a browser would have a window."""
    return any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))


def is_root() -> bool:
    """Whether this process may change the machine."""
    return os.geteuid() == 0


def _xdg(env: Mapping[str, str], name: str, default: str) -> Path:
    """A base directory's quantd folder. The specification says to ignore relative values."""
    value = Path(env.get(name, ""))
    base = value if value.is_absolute() else Path(env.get("HOME") or Path.home()) / default
    return base / "quantd"


def _default_socket(env: Mapping[str, str], uid: int, state: Path) -> Path:
    if uid == 0:
        return SYSTEM_SOCKET
    runtime = Path(env.get("XDG_RUNTIME_DIR", ""))
    return runtime / "quantd" / "api.sock" if runtime.is_absolute() else state / "run" / "api.sock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How engines run, whatever the model: the settable fields of EngineConfig, with its defaults."""

    backend: Backend = setting_like(EngineConfig, "backend", choice(get_args(Backend)), "Kernels to use.")
    kv_dtype: KVDtype = setting_like(
        EngineConfig, "kv_dtype", choice(get_args(KVDtype), _KV_ALIASES), "Format of the KV cache."
    )
    activations: Activations = setting_like(
        EngineConfig,
        "activations",
        choice(get_args(Activations)),
        "fp32 keeps activations unrounded where a backend would round them.",
    )
    same_bits: bool | None = setting_like(
        EngineConfig,
        "same_bits",
        switch(),
        "On a GPU, answers do not depend on who else is served. On, but off before sm_80: it slows prompts.",
    )
    kv_memory: int | None = setting_like(
        EngineConfig, "kv_memory", size(), "Memory of the KV cache; what is free if not given."
    )
    vram_reserve: int = setting_like(
        EngineConfig, "vram_reserve", size(0), "Memory of each GPU that is left to other programs."
    )
    max_model_len: int | None = setting_like(
        EngineConfig, "max_model_len", whole(1), "Most tokens of one request; the model's limit if not given."
    )
    max_num_tokens: int = setting_like(
        EngineConfig, "max_num_tokens", whole(1), "Most tokens that one step computes."
    )
    max_num_requests: int = setting_like(
        EngineConfig, "max_num_requests", whole(1), "Most requests that run at a time."
    )
    prefix_caching: bool = setting_like(
        EngineConfig, "prefix_caching", switch(), "Keep and reuse the cache of common prefixes."
    )
    disk_cache: int | None = setting_like(
        EngineConfig,
        "disk_cache",
        size(0),
        "Bytes of prefixes kept on disk for all models, 0 for none; 10 GB or a quarter of what is free.",
    )
    threads: int = setting_like(
        EngineConfig, "threads", whole(0, 1024), "Compute threads of a rank; 0 for all physical cores."
    )
    tp: int = setting_like(EngineConfig, "tp", whole(1, 64), "Ranks that share each matrix of a model.")
    split: str = setting_like(
        EngineConfig, "split", _SPLIT, "Spread the layers over stages: auto, or the share of each."
    )

    def for_model(self, model_path: Path, kernel_cache: Path, prefixes: Path | None = None) -> EngineConfig:
        """The record that an engine process for the model in this folder gets."""
        return EngineConfig(
            model_path=str(model_path),
            kernel_cache=str(kernel_cache),
            prefix_folder=None if prefixes is None else str(prefixes),
            **dataclasses.asdict(self),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How a daemon runs. socket, port: None for none. model: the one to load at the start."""

    socket: Path | None = setting(
        path_or_off(),
        "Unix socket to listen on.",
        default_factory=lambda: Paths.from_env().socket,
        env="QUANTD_SOCKET",
    )
    host: str = setting(text(), "Address to listen on.", default="127.0.0.1")
    port: int | None = setting(tcp_port(), "TCP port to listen on.", default=DEFAULT_PORT)
    model: str | None = setting(text(), "Model to load at the start.")
    drain_seconds: float = setting(
        seconds(), "How long a stop waits for the requests that run.", default=30.0
    )
    keep_alive: float = setting(
        duration(), "How long a model stays in memory after its last request.", default=900.0
    )
    hang_seconds: float = setting(
        seconds(), "End an engine whose steps stand still for so long; 0 for never.", default=300.0
    )
    pin: tuple[str, ...] = setting(names(), "Models that stay in memory once they are loaded.", default=())
    max_models: int | None = setting(whole(1), "Most models in memory; as many as fit if not given.")
    max_memory: int | None = setting(
        size(), "Most memory of all models together, KV caches included; what is free if not given."
    )
    memory_wait: float = setting(
        seconds(),
        "How long a load waits for memory that running requests of other models hold.",
        default=60.0,
    )
    idle_exit: float | None = setting(
        duration(), "End after so long without a model in memory, to be started again by systemd's sockets."
    )
    request_log: Path | None = setting(
        path_or_off(),
        "File with a line of JSON for each request; no prompts.",
        default_factory=lambda: Paths.from_env().requests,
    )
    log_prompts: bool = setting(switch(), "Write the text of prompts to the request log too.", default=False)
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    limits: Limits = dataclasses.field(default_factory=Limits)
    access: AccessOptions = dataclasses.field(default_factory=AccessOptions)
    paths: Paths = dataclasses.field(default_factory=Paths.from_env)
    supervision: Supervision = dataclasses.field(default_factory=Supervision)


PARTS: Mapping[str, type[Any]] = {"engine": EngineOptions, "limits": Limits, "access": AccessOptions}
"""Records with a table of their own in the file."""


def load_config(
    flags: Mapping[str, object], file: Path | None = None, env: Mapping[str, str] | None = None
) -> ServeConfig:
    """The configuration of a daemon. `flags` maps setting names to values; None: not given.

    `file` is the one that must be read; without it $QUANTD_CONFIG, or quantd.toml in the config folder if
    there is one. Raises ConfigError naming the flag, variable, or file and key, and what it takes.
    """
    env = os.environ if env is None else env
    paths = Paths.from_env(env)
    path, table = _read_file(file, env)
    _part(table, "client", path)
    parts = {
        name: record(**_gather(record, flags, env, f"{path}: {name}.", _part(table, name, path)))
        for name, record in PARTS.items()
    }
    daemon = _gather(ServeConfig, flags, env, f"{path}: ", table)
    return ServeConfig(
        **({"socket": paths.socket, "request_log": paths.requests} | daemon),
        **parts,
        paths=paths,
        supervision=Supervision.from_env(env),
    )


def _part(table: dict[str, Any], name: str, path: Path | None) -> dict[str, Any]:
    """Take a table out of the file's."""
    part = table.pop(name, {})
    if not isinstance(part, dict):
        raise ConfigError(f"{path}: {name} must be a table: [{name}]")
    return part


def parse_flags(record: type[Any], flags: Mapping[str, object]) -> dict[str, Any]:
    """The parsed values of those flags that were given. Raises ConfigError."""
    return _gather(record, flags, {}, "", {})


def client_sockets(socket: str | None, env: Mapping[str, str] | None = None) -> list[Path]:
    """Where a client looks for a daemon, in order: the socket asked for, else the user's and the system's."""
    env = os.environ if env is None else env
    if chosen := socket or env.get("QUANTD_SOCKET"):
        return [] if chosen == "off" else [Path(chosen).expanduser().absolute()]
    own = Paths.from_env(env).socket
    return [own] if env.get("QUANTD_HOME") else list(dict.fromkeys([own, SYSTEM_SOCKET]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """How commands reach a daemon elsewhere: the table [client] of the file."""

    key: str | None = setting(text(), "API key for a daemon at --host.", env="QUANTD_KEY")


def client_key(env: Mapping[str, str] | None = None) -> str | None:
    """The API key of this user's commands. Raises ConfigError."""
    env = os.environ if env is None else env
    path, table = _read_file(None, env)
    return ClientConfig(
        **_gather(ClientConfig, {}, env, f"{path}: client.", _part(table, "client", path))
    ).key


def _read_file(file: Path | None, env: Mapping[str, str]) -> tuple[Path | None, dict[str, Any]]:
    """The file that counts, and what it says: the one given, else that of the environment, else the usual."""
    path = file or (Path(env["QUANTD_CONFIG"]).expanduser() if env.get("QUANTD_CONFIG") else None)
    usual = Paths.from_env(env).config
    if path is None and usual.exists():
        path = usual
    return path, {} if path is None else _read_toml(path)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _gather(
    record: type[Any], flags: Mapping[str, object], env: Mapping[str, str], where: str, table: dict[str, Any]
) -> dict[str, Any]:
    """The values given for a record's settings. `where` leads to the table's keys in messages."""
    settings = settings_of(record)
    for key in table.keys() - settings.keys():
        raise ConfigError(f"{where}{key}: no such key; {_suggest(key, settings)}")
    chosen = {name: _choose(setting, flags, env, where, table) for name, setting in settings.items()}
    return {name: settings[name].parse(*found) for name, found in chosen.items() if found is not None}


def _choose(
    setting: Setting, flags: Mapping[str, object], env: Mapping[str, str], where: str, table: dict[str, Any]
) -> tuple[object, str] | None:
    """The value given for a setting where it counts most, and that place's name."""
    if flags.get(setting.name) is not None:
        return flags[setting.name], setting.flag
    if setting.env is not None and env.get(setting.env):
        return env[setting.env], setting.env
    return (table[setting.name], where + setting.name) if setting.name in table else None


def _suggest(key: str, known: Mapping[str, Setting]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else "known keys: " + ", ".join(known)


def named_compiler() -> str | None:
    """The C compiler that the user names, in CC; other programs read it there too."""
    return os.environ.get("CC") or None
