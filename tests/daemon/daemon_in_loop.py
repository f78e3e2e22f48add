"""A daemon in this process: the real app behind a Unix socket and a port, over engines without a model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from fake_models import CHATML, write_model
from scripted_engine import INFO, Engines, FakeStore, Script, ScriptedEngine, repeat_prompt
from waiting import run_steadily, until_so

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.policy import Access
from quantd.daemon.app import make_app, make_runner
from quantd.daemon.config import ServeConfig
from quantd.daemon.control import Control
from quantd.daemon.http_connection import Site
from quantd.daemon.limits import DEFAULT_LIMITS, Limits
from quantd.daemon.metrics import Metrics
from quantd.daemon.models import LoadTokenizer, Models
from quantd.daemon.server import engine_config
from quantd.daemon.service import Service
from quantd.daemon.sockets import tcp_sockets, unix_socket
from quantd.daemon.store import Store
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.wire.stream import DEFAULT_TIMING, Timing

CASES = Path(__file__).parents[1] / "data" / "cases"


def case(name: str) -> dict[str, Any]:
    """The body of a handed case."""
    return json.loads((CASES / f"{name}.json").read_text())["body"]


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        run_steadily(test(**fixtures))

    return run


@dataclass
class Daemon:
    """The daemon under test and ways to talk to it."""

    path: Path
    port: int
    service: Service
    engines: Engines
    store: FakeStore | Store
    session: aiohttp.ClientSession

    @property
    def engine(self) -> ScriptedEngine:
        """The engine started last."""
        return self.engines.started[-1]

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.session.post(f"http://any-name{path}", json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"http://any-name{path}") as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: object) -> str:
        async with self.session.post(f"http://any-name{path}", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return (await response.read()).decode()

    def over_port(self, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
        """A session over TCP."""
        return aiohttp.ClientSession(base_url=f"http://127.0.0.1:{self.port}", headers=headers)

    async def leave(self, path: str, body: object) -> None:
        """Ask an engine whose gate is closed, and go away while it is at it."""
        asking = asyncio.create_task(self.post(path, body))
        await until_so(lambda: self.engine.running)
        asking.cancel()
        await asyncio.wait([asking])
        await self.settle()

    async def settle(self) -> None:
        """Wait until no request runs any more."""
        await until_so(lambda: not any(engine.running for engine in self.engines.started))


@contextlib.asynccontextmanager
async def running_daemon(
    script: Script = repeat_prompt,
    template: str | None = CHATML,
    max_queue: int = 512,
    timing: Timing = DEFAULT_TIMING,
    tokens: Sequence[str] = (),
    store: Store | None = None,
    load_tokenizer: LoadTokenizer = Tokenizer.load,
    access: Access | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[Daemon]:
    """tokens: special tokens that the model has beside ChatML's. store: in place of one with `tiny`."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as opened:
        folder = Path(name)
        folder.chmod(0o711)  # for tests as another user
        info = msgspec.structs.replace(INFO, vocab_size=INFO.vocab_size + len(tokens))
        engines, fake_store = Engines(script, info), FakeStore()
        fake_store.add("tiny", write_model(folder / "tiny", template, tokens))
        models = Models(
            store or fake_store,
            engines.start,
            functools.partial(engine_config, ServeConfig()),
            drain_seconds=5.0,
            load_tokenizer=load_tokenizer,
        )
        service = Service(models, Metrics(), max_queue, limits.max_client_queue)
        listeners = [opened.enter_context(unix_socket(folder / "api.sock"))]
        listeners += opened.enter_context(tcp_sockets("127.0.0.1", 0))
        control = Control(models, "0.0.0", folder / "state", folder / "prefixes", ["unix"])
        runner = make_runner(
            make_app(service, control, access or Access(KeyFile(folder / "keys.json")), timing, limits)
        )
        await runner.setup()
        for listener in listeners:
            await Site(runner, listener, limits).start()
        connector = aiohttp.UnixConnector(str(folder / "api.sock"))
        async with aiohttp.ClientSession(connector=connector) as session:
            port = listeners[1].getsockname()[1]
            yield Daemon(folder / "api.sock", port, service, engines, store or fake_store, session)
        await runner.cleanup()
        await models.close()
        await service.close()
