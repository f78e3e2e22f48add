"""The daemon as a process: sockets, signals, and the order of its start and end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.peers import is_local
from quantd.daemon.activity import Activity
from quantd.daemon.app import make_app, make_runner
from quantd.daemon.config import ServeConfig
from quantd.daemon.control import Control
from quantd.daemon.errors import ListenError
from quantd.daemon.http_connection import Site
from quantd.daemon.limits import Limits
from quantd.daemon.logs import LogPlace, log_to_stderr
from quantd.daemon.metrics import Metrics
from quantd.daemon.models import LoadTokenizer, Models
from quantd.daemon.request_log import RequestLog
from quantd.daemon.service import Service
from quantd.daemon.sockets import BACKLOG, allow_open_files, name_of, tcp_sockets, unix_socket
from quantd.daemon.store import Store, plain_name
from quantd.daemon.supervision import Notifier
from quantd.daemon.template_process import TemplateProcess
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.watch import Watch, tell_end
from quantd.engine.client import EngineClient
from quantd.engine.config import EngineConfig
from quantd.engine.errors import RequestError
from quantd.kernels.errors import QuantdError

_log = logging.getLogger(__name__)

# Files that are open beside the connections of clients: engines, workers, models that are fetched.
_OTHER_FILES = 512
# What engines may take to end, beside the requests that run.
_CLOSE_SECONDS = 10.0


def run_server(config: ServeConfig) -> int:
    """Serve until SIGTERM, SIGINT or a stop request; the exit status.

    The first signal lets running requests finish for up to drain_seconds and gives 0, a second ends all
    at once and gives 1. Raises ListenError, and ModelNotFoundError for a model to preload.
    """
    log = log_to_stderr()
    # All that wait are accepted before the first of them is refused.
    allow_open_files(config.limits.max_connections + BACKLOG + _OTHER_FILES)
    with contextlib.ExitStack() as opened:
        listeners = _listen(config, opened)
        _check_reach(listeners, config.access.key_file(config.paths.state))
        return asyncio.run(_serve(config, listeners, log))


def _listen(config: ServeConfig, opened: contextlib.ExitStack) -> list[socket.socket]:
    """The sockets of a service manager, if it has handed over any, else those configured."""
    listeners = [opened.enter_context(contextlib.closing(sock)) for sock in config.supervision.sockets()]
    if listeners:
        return listeners
    if config.socket is not None:
        group = config.access.socket_group
        listeners.append(opened.enter_context(unix_socket(config.socket, group)))
    if config.port is not None:
        listeners += opened.enter_context(tcp_sockets(config.host, config.port))
    if not listeners:
        raise ListenError("nothing to listen on: give --socket or --port")
    return listeners


def _check_reach(listeners: list[socket.socket], keys: KeyFile) -> None:
    """Raises ListenError for an address that other machines reach where there are no API keys."""
    open_to_others = [name_of(sock) for sock in listeners if not is_local(sock)]
    if open_to_others and not keys.all():
        raise ListenError(
            f"{', '.join(open_to_others)}: other machines can reach this, and there are no API keys in "
            f"{keys.path}. Make one first: quantd key add NAME; or listen on 127.0.0.1 alone"
        )


async def _serve(config: ServeConfig, listeners: list[socket.socket], log: LogPlace) -> int:
    with contextlib.closing(TemplateProcess()) as run, contextlib.closing(TemplateProcess()) as run_guests:
        models = _models(config, partial(Tokenizer.load, run=run, run_guests=run_guests))
        return await _serve_models(config, listeners, models, log)


def _models(config: ServeConfig, load_tokenizer: LoadTokenizer) -> Models:
    return Models(
        Store(config.paths.models),
        EngineClient.start,
        lambda path, options: engine_config(config, path, options),
        default=config.model,
        drain_seconds=config.drain_seconds,
        keep_alive=config.keep_alive,
        hang_seconds=config.hang_seconds,
        load_tokenizer=load_tokenizer,
        pinned=[plain_name(name) for name in config.pin],
        max_models=config.max_models,
        max_memory=config.max_memory,
        memory_wait=config.memory_wait,
    )


async def _serve_models(
    config: ServeConfig, listeners: list[socket.socket], models: Models, log: LogPlace
) -> int:
    preload = None if config.model is None else models.store.get(config.model).name
    limits = config.limits
    service = Service(models, Metrics(), limits.max_queue, limits.max_client_queue)
    version, names = importlib.metadata.version("quantd"), [name_of(sock) for sock in listeners]
    paths = config.paths
    control = Control(
        models, version, paths.state, paths.prefixes, names, log=log, request_log=config.request_log
    )
    abort = _handle_signals(control.stop)
    notifier = Notifier(config.supervision.notify_address)
    app = make_app(service, control, config.access.access(config.paths.state), limits=limits)
    async with _logging(config, service.activity), _running(app, listeners, limits) as runner:
        print("READY", *control.listening, file=sys.stderr, flush=True)
        notifier.ready()
        asides = [asyncio.create_task(work) for work in _asides(config, models, preload, notifier, control)]
        await control.stop.wait()
        _log.info("stopping: requests may run for another %g s", config.drain_seconds)
        for aside in asides:
            aside.cancel()
        telling = asyncio.create_task(tell_end(notifier, config.drain_seconds, _CLOSE_SECONDS))
        finished = await _drain(service, runner, config.drain_seconds, abort)
        await models.close()
        telling.cancel()
        await service.close()
    _log.info("stopped")
    return 0 if finished else 1


@contextlib.asynccontextmanager
async def _logging(config: ServeConfig, activity: Activity) -> AsyncIterator[None]:
    """Requests that are over are logged, if they are to be."""
    if config.request_log is None:
        yield
        return
    log = RequestLog(config.request_log)
    activity.keeps_prompts = config.log_prompts
    activity.on_end.append(log.add)
    try:
        yield
    finally:
        log.close()


def _asides(
    config: ServeConfig, models: Models, preload: str | None, notifier: Notifier, control: Control
) -> Iterator[Coroutine[Any, Any, None]]:
    """What goes on beside serving."""
    supervision, idle_exit = config.supervision, config.idle_exit
    if preload is not None:
        yield _preload(models, preload)
    if supervision.notify_address is not None or idle_exit is not None:
        watchdog_seconds, is_busy = supervision.watchdog_seconds, lambda: control.num_requests > 0
        yield Watch(models, notifier, watchdog_seconds, idle_exit, control.stop.set, is_busy).run()


def engine_config(config: ServeConfig, path: Path, options: Mapping[str, Any]) -> EngineConfig:
    """The record for one model: the daemon's engine options with some changed by a request.

    Raises RequestError naming an option that is unknown or has a bad value.
    """
    known = {field.name for field in dataclasses.fields(config.engine)}
    for name in options.keys() - known:
        raise RequestError(
            f"options.{name}: no such engine option; known: {', '.join(sorted(known))}", "options"
        )
    usual = config.engine.for_model(path, config.paths.kernels, config.paths.prefixes)
    record = msgspec.structs.asdict(usual) | dict(options)
    try:
        return msgspec.convert(record, EngineConfig)
    except msgspec.ValidationError as error:
        raise RequestError(f"options: {error}", "options") from None


@contextlib.asynccontextmanager
async def _running(
    app: web.Application, listeners: list[socket.socket], limits: Limits
) -> AsyncIterator[web.AppRunner]:
    """The app behind its sockets."""
    runner = make_runner(app)
    await runner.setup()
    try:
        for listener in listeners:
            await Site(runner, listener, limits).start()
        yield runner
    finally:
        await runner.cleanup()


def _handle_signals(stop: asyncio.Event) -> asyncio.Event:
    """Let the first signal set `stop`; the event returned is set by the second."""
    abort = asyncio.Event()

    def on_signal() -> None:
        (abort if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return abort


async def _preload(models: Models, name: str) -> None:
    """Load a model at the start. A failure leaves the daemon up: the next request tries again."""
    try:
        entry = await models.open(name)
    except QuantdError as error:
        _log.error("%s cannot be loaded: %s", name, error)
        return
    with contextlib.suppress(QuantdError):  # of which Models tells
        await entry.loaded()


async def _drain(service: Service, runner: web.AppRunner, seconds: float, abort: asyncio.Event) -> bool:
    """Accept no more, and wait for what runs; False where a second signal cut that short."""
    service.refuse_new()
    for site in list(runner.sites):
        await site.stop()
    waiters = [asyncio.create_task(service.wait_idle()), asyncio.create_task(abort.wait())]
    await asyncio.wait(waiters, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for waiter in waiters:
        waiter.cancel()
    return not abort.is_set()
