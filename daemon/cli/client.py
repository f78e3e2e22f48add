"""Blocking HTTP to a daemon, over its Unix socket or TCP, with nothing but the standard library.

One connection a request: closing it is how a client says that it no longer wants the answer.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantd.daemon.config import DEFAULT_PORT, client_key
from quantd.daemon.errors import ConfigError, DaemonError, NoDaemonError

_CONTROL_TIMEOUT = 60.0
_CONNECT_TIMEOUT = 5.0
_HOST = re.compile(r"(?:\[(?P<ip6>[^\]]+)\]|(?P<name>[^:/\[\]]+))(?::(?P<port>\d{1,5}))?")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class DaemonClient:
    """A daemon at one address: the path of a Unix socket, or (host, port). key: sent over TCP alone."""

    def __init__(self, address: Path | tuple[str, int], key: str | None = None) -> None:
        self.address = address
        self.headers = {"Content-Type": "application/json"}
        if key is not None and isinstance(address, tuple):
            self.headers["Authorization"] = f"Bearer {key}"

    @property
    def url(self) -> str:
        """The address in words."""
        return (
            f"unix:{self.address}" if isinstance(self.address, Path) else "http://{}:{}".format(*self.address)
        )

    def get(self, path: str, timeout: float = _CONTROL_TIMEOUT) -> Any:
        """The JSON that GET answers. Raises DaemonError, NoDaemonError."""
        with self._exchange("GET", path, None, timeout) as response:
            return _decode(response.read())

    def post(self, path: str, body: object, timeout: float = _CONTROL_TIMEOUT) -> Any:
        """The JSON that POST answers in so many seconds. Raises DaemonError, NoDaemonError."""
        with self._exchange("POST", path, body, timeout) as response:
            return _decode(response.read())

    def delete(self, path: str) -> Any:
        """The JSON that DELETE answers. Raises DaemonError, NoDaemonError."""
        with self._exchange("DELETE", path, None, _CONTROL_TIMEOUT) as response:
            return _decode(response.read())

    def wants_key(self) -> bool:
        """Whether the daemon, if it answers, refuses clients with this key, or without one."""
        try:
            self.get("/v1/models")
        except (DaemonError, NoDaemonError) as error:
            return isinstance(error, DaemonError) and error.code == "invalid_api_key"
        return False

    def lines(self, path: str, body: object) -> Iterator[Any]:
        """The objects of an NDJSON answer as they come; an `error` among them is raised as DaemonError."""
        with self._exchange("POST", path, body, None) as response:
            for line in response:
                if line.strip():
                    yield _checked(_decode(line))

    def events(self, path: str, body: object) -> Generator[Any]:
        """The data of a server-sent event stream as it comes, up to `[DONE]` (WHATWG HTML, section 9.2).

        Raises DaemonError for an error event, and for a stream that ends before `[DONE]`.
        """
        with self._exchange("POST", path, body, None) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    return
                yield _checked(_decode(data))
        raise DaemonError("The daemon ended the answer before it was complete.")

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: object, timeout: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            connection.sock.settimeout(timeout)
            payload = None if body is None else _encode(body)
            connection.request(method, path, payload, self.headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _refusal(response)
            yield response
        except TimeoutError:
            raise DaemonError(f"The daemon at {self.url} gave no answer in {timeout:g} seconds.") from None
        except (OSError, http.client.HTTPException) as error:
            raise DaemonError(f"The connection to the daemon at {self.url} broke: {error!r}") from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if isinstance(self.address, Path):
            connection: http.client.HTTPConnection = _UnixConnection(self.address, _CONNECT_TIMEOUT)
        else:
            connection = http.client.HTTPConnection(*self.address, timeout=_CONNECT_TIMEOUT)
        try:
            connection.connect()
        except PermissionError:
            connection.close()
            raise DaemonError(f"You may not use {self.address}; its owner or group can let you.") from None
        except OSError as error:
            connection.close()
            raise NoDaemonError(f"No daemon answers at {self.url} ({error.strerror or error}).") from None
        return connection


def find_daemon(sockets: list[Path], host: str | None) -> DaemonClient:
    """The first daemon that answers: at `host` ("HOST[:PORT]", with the key of this user's configuration)
    if given, else on one of the sockets.

    Raises NoDaemonError telling how to start one.
    """
    if host is None:
        clients = [DaemonClient(path) for path in sockets]
    else:
        clients = [DaemonClient(parse_host(host), client_key())]
    for client in clients:
        try:
            client.get("/quantd/version")
        except NoDaemonError:
            continue
        return client
    places = " or ".join(client.url for client in clients) or "any socket"
    raise NoDaemonError(f"No daemon answers at {places}. Start one with: quantd serve")


def parse_host(host: str) -> tuple[str, int]:
    """("::1", 8080) of "[::1]:8080", the usual port where none is given. Raises ConfigError."""
    match = _HOST.fullmatch(host.removeprefix("http://").removesuffix("/"))
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 2**16:
        raise ConfigError(f"--host: {host!r} is not accepted; use HOST[:PORT], such as 127.0.0.1:11435")
    return match["name"] or match["ip6"], port


def _encode(body: object) -> str:
    try:
        return json.dumps(body, allow_nan=False)
    except ValueError:
        raise DaemonError("nan and inf cannot be sent; give a number.") from None


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise DaemonError(f"What answers is not a quantd daemon: {data[:80]!r}") from None


def _checked(message: Any) -> Any:
    error = message.get("error") if isinstance(message, dict) else None
    if error is None:
        return message
    detail = error if isinstance(error, dict) else {"message": str(error)}
    raise DaemonError(str(detail.get("message", error)), detail.get("code"))


def _refusal(response: http.client.HTTPResponse) -> DaemonError:
    """The error that an answer of status 400 or more stands for."""
    try:
        _checked(json.loads(response.read()))
    except DaemonError as error:
        return error
    except ValueError:
        pass
    return DaemonError(f"The daemon answered {response.status} {response.reason}.")
