"""A model hub on loopback: just enough of the Hugging Face hub's HTTP for its client library to download."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(ThreadingHTTPServer):
    """Serves `repos`: repository -> file name -> bytes.

    `broken` names a file it cannot give, `altered` one that comes with other bytes than it is said to have.
    Files of weights have LFS records, the others git's blob ids; of those in `unlisted` only the answer with
    the file itself tells. It answers nothing while `released` is not set.
    """

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.broken: str | None = None
        self.altered: str | None = None
        self.unlisted: set[str] = set()
        self.released = threading.Event()
        self.released.set()
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.server.released.wait()
        self.server.requests.append(f"{self.command} {self.path.rpartition('/')[2]}")
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/(\w+))?", path):
            self.model_info(match[1])
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/\w+/(.+)", path):
            self.file(match[1], match[2], body)
        else:
            self.missing("EntryNotFound")

    def model_info(self, repo: str) -> None:
        if repo not in self.server.repos:
            return self.missing("RepoNotFound")
        siblings = [self.sibling(name, data) for name, data in self.server.repos[repo].items()]
        text = json.dumps({"id": repo, "sha": SHA, "siblings": siblings, "tags": [], "private": False})
        self.send(200, text.encode(), {"Content-Type": "application/json"})
        return None

    def sibling(self, name: str, data: bytes) -> dict[str, object]:
        told: dict[str, object] = {"rfilename": name, "size": len(data)}
        if name in self.server.unlisted:
            return told
        told["blobId"] = blob_id(data)
        if is_large(name):
            told["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 99}
        return told

    def file(self, repo: str, name: str, body: bool) -> None:
        data = self.server.repos.get(repo, {}).get(name)
        if data is None or name == self.server.broken:
            return self.missing("EntryNotFound")
        etag = hashlib.sha256(data).hexdigest() if is_large(name) else blob_id(data)
        if name == self.server.altered:
            data = bytes(len(data))
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA}
        self.send(200, data, headers, body)
        return None

    def missing(self, code: str) -> None:
        self.send(404, b"", {"X-Error-Code": code})

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def running_hub(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    with Hub(repos) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()
