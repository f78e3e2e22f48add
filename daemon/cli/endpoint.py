"""Which address and model `quantd connect` tells of: those of the daemon, or of its configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from quantd.daemon.capabilities import Capabilities, read_capabilities
from quantd.daemon.cli.client import DaemonClient, find_daemon
from quantd.daemon.config import ServeConfig, client_sockets
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.errors import ConfigError, ModelNotFoundError, NoDaemonError
from quantd.daemon.model_files import read_json
from quantd.daemon.store import Store
from quantd.quant.errors import CheckpointError

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_NO_PORT = (
    "the daemon listens on no TCP port, which other programs need: start it with quantd serve --port 11435, "
    "or set port = 11435 in quantd.toml"
)


def find_endpoint(
    socket: str | None, host: str | None, model: str | None, key: str | None, config: ServeConfig
) -> Endpoint:
    """The endpoint at the daemon that answers, else at the one that the configuration describes.

    key: for programs to send. Raises ConfigError where that can be none, the daemon has no port or the model
    is not clear, ModelNotFoundError, and NoDaemonError for a daemon that was asked for by address.
    """
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError("the key has characters that no key has: see RFC 6750, section 2.1")
    try:
        client = find_daemon(client_sockets(socket), host)
    except NoDaemonError:
        if socket is not None or host is not None:
            raise
        return dataclasses.replace(_configured(model, config), key=key)
    endpoint = _running(client, model, config)
    wants_key = DaemonClient((endpoint.host, endpoint.port), key).wants_key()
    return dataclasses.replace(endpoint, key=key, wants_key=wants_key)


def _configured(model: str | None, config: ServeConfig) -> Endpoint:
    if config.port is None:
        raise ConfigError(_NO_PORT)
    if config.port == 0:
        raise ConfigError(
            "the port is 0, another one at each start; editors need one that stays: --port 11435"
        )
    store = Store(config.paths.models)
    name = choose_model(model, [stored.name for stored in store.list()], [], config.model)
    trained, asked = trained_len(store, name), config.engine.max_model_len
    limit = min(trained, asked) if trained and asked else trained or asked
    host = _LOOPBACK.get(config.host, config.host)
    return Endpoint(host, config.port, name, limit, _capabilities(store, name))


def _running(client: DaemonClient, model: str | None, config: ServeConfig) -> Endpoint:
    status = client.get("/quantd/status")
    host, port = tcp_address(client, status["listening"])
    entries = {entry["id"]: entry for entry in client.get("/v1/models")["data"]}
    loaded = [entry["name"] for entry in status["models"] if entry["info"] is not None]
    store = Store(config.paths.models)
    name = choose_model(model, list(entries), loaded, config.model)
    limit = entries[name].get("max_model_len") or trained_len(store, name)
    return Endpoint(
        host, port, name, limit, _capabilities(store, name), answers=True, is_loaded=name in loaded
    )


def choose_model(asked: str | None, known: Sequence[str], loaded: Sequence[str], preset: str | None) -> str:
    """The model that was asked for; else the one that is loaded, that is preset, or that is the only one.

    Raises ModelNotFoundError, and ConfigError where several are as good.
    """
    if asked is not None:
        if asked not in known:
            there = ", ".join(known) or "none"
            raise ModelNotFoundError(f"there is no model {asked!r}; there are: {there}")
        return asked
    for candidates in (loaded, [name for name in known if name == preset], known):
        if len(candidates) == 1:
            return candidates[0]
    if not known:
        raise ConfigError("there is no model yet; fetch one first: quantd pull smollm2")
    raise ConfigError(f"which model? Say --model with one of: {', '.join(known)}")


def trained_len(store: Store, name: str) -> int | None:
    """The context that a stored model was trained for, as its config.json says."""
    try:
        config = read_json(store.get(name).path / "config.json")
    except ModelNotFoundError:
        return None
    text = config.get("text_config", config)
    length = text.get("max_position_embeddings") if isinstance(text, Mapping) else None
    return length if isinstance(length, int) and length > 0 else None


def _capabilities(store: Store, name: str) -> Capabilities | None:
    try:
        return read_capabilities(store.get(name).path)
    except (ModelNotFoundError, CheckpointError):
        return None


def tcp_address(client: DaemonClient, listening: Sequence[str]) -> tuple[str, int]:
    """Host and port at which other programs reach the daemon that listens there. Raises ConfigError."""
    if isinstance(client.address, tuple):
        return client.address
    for name in listening:
        url = urlsplit(name)
        if url.scheme == "http" and url.hostname and url.port:
            return _LOOPBACK.get(url.hostname, url.hostname), url.port
    raise ConfigError(_NO_PORT)
