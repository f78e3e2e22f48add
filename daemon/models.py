"""The models in memory: loaded on request, each by its own engine process, and unloaded.

Knows names, states and processes; nothing of text or HTTP. Concurrent requests for one model share one
load. Models are kept in order of use, the latest last.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quantd.daemon.deaths import MOST_DEATHS, Deaths
from quantd.daemon.embedding_head import EmbeddingHead
from quantd.daemon.engine_totals import EngineTotals
from quantd.daemon.errors import ModelNotFoundError, NoRoomError
from quantd.daemon.keep_alive import KeepAlive
from quantd.daemon.loaded_model import Engine, LoadedModel, ModelEntry, Progress
from quantd.daemon.model_files import model_sampling
from quantd.daemon.preset import Preset
from quantd.daemon.pulse import Pulse
from quantd.daemon.room import Resident, Room
from quantd.daemon.sleep import Sleep
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.client import MakeRoom
from quantd.engine.config import Allowance, EngineConfig
from quantd.engine.errors import CapacityError, EngineDiedError, RequestError
from quantd.engine.messages import Stats

_log = logging.getLogger(__name__)
# An engine answers between two steps; one that does not is left out.
_STATS_SECONDS = 5.0
_GARBAGE_SECONDS = 0.1
# How long requests may take to end before the machine sleeps.
_SUSPEND_SECONDS = 5.0
_LAST_STATS_SECONDS = 0.2


class StoredModel(Protocol):
    """A model on disk, as `quantd.daemon.store.StoredModel` is one."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def source(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def created(self) -> float: ...


class ModelStore(Protocol):
    """Where models lie, as in `quantd.daemon.store.Store`. `get` and `remove` raise ModelNotFoundError."""

    @property
    def root(self) -> Path: ...

    def remove(self, name: str) -> None: ...

    def get(self, name: str) -> StoredModel: ...

    def list(self) -> Sequence[StoredModel]: ...


StartEngine = Callable[[EngineConfig, Progress, MakeRoom], Awaitable[Engine]]
MakeConfig = Callable[[Path, Mapping[str, Any]], EngineConfig]
LoadTokenizer = Callable[[Path], Tokenizer]


class Models:
    """All models of a daemon.

    start: starts an engine. make_config: the record for a model folder with some options changed.
    default: the model for requests that name none while nothing is loaded. drain_seconds: how long an
    unload waits for the requests that run. keep_alive: seconds that a model stays after its last request.
    hang_seconds: the longest that a step of an engine may take; 0: no limit. load_tokenizer: reads a folder.
    on_gone: called with each entry that has left.
    pinned: the names of models that stay for ever. max_models, memory_wait: see Room. max_memory: bytes of
    all models together.
    """

    def __init__(
        self,
        store: ModelStore,
        start: StartEngine,
        make_config: MakeConfig,
        default: str | None = None,
        drain_seconds: float = 30.0,
        keep_alive: float = math.inf,
        hang_seconds: float = 0.0,
        load_tokenizer: LoadTokenizer = Tokenizer.load,
        pinned: Collection[str] = (),
        max_models: int | None = None,
        max_memory: int | None = None,
        memory_wait: float = 0.0,
    ) -> None:
        self.store = store
        self._start = start
        self._make_config = make_config
        self._default = default
        self._drain_seconds = drain_seconds
        self._keep_alive = keep_alive
        self._hang_seconds = hang_seconds
        self._load_tokenizer = load_tokenizer
        self._sleep = Sleep()
        self._entries: dict[str, ModelEntry] = {}
        self.on_gone: Callable[[ModelEntry], object] = lambda entry: None
        self.totals = EngineTotals()
        self._max_memory = max_memory
        self._always_pinned = frozenset(pinned)
        self._pinned = set(pinned)
        self.deaths = Deaths()
        self._room = Room(self._residents, self.retire, max_models, memory_wait)
        # Two loads at once would both count on the memory that is free.
        self._turn = asyncio.Lock()

    @property
    def entries(self) -> list[ModelEntry]:
        """What is in memory or on its way, the latest used last."""
        return list(self._entries.values())

    @property
    def stuck(self) -> list[str]:
        """The models whose engines hang and cannot be ended."""
        return [entry.name for entry in self.entries if entry.model and entry.model.pulse.is_stuck]

    def find(self, name: str | None) -> StoredModel:
        """The stored model that requests with this name go to. Raises ModelNotFoundError."""
        return self.store.get(self._resolve(name))

    def context_len(self, stored: StoredModel) -> int | None:
        """Tokens of one request that a model serves, or would serve; None where only its files tell."""
        entry = self._entries.get(stored.name)
        if entry is not None and entry.model is not None:
            return entry.model.engine.info.max_request_len
        return self._make_config(stored.path, {}).max_model_len

    def entry(self, name: str) -> ModelEntry:
        """The entry of a model that is in memory or on its way."""
        return self._entries[name]

    async def acquire(
        self, name: str | None, waiting: Callable[[ModelEntry], None] = lambda entry: None
    ) -> LoadedModel:
        """The model of this name, loaded if need be; its `release` must follow.

        waiting: told what it waits for.

        None or "default": the latest used, else the configured, else the only one there is. Raises
        ModelNotFoundError, or what keeps the model from loading.
        """
        name = self._resolve(name)
        for _ in range(MOST_DEATHS):
            entry = await self.open(name)
            waiting(entry)
            try:
                model = await entry.awaited()
            except EngineDiedError:
                # One that died in its load is tried again; one that was unloaded is not.
                if entry.load.cancelled():
                    raise
                continue
            if entry.state == "ready" and not model.engine.died.done():
                self._entries[name] = self._entries.pop(name)
                model.acquire()
                return model
        self.deaths.check(name)
        raise EngineDiedError(f"the engine of {name} ends as soon as it is loaded; see the daemon's log")

    async def open(self, name: str, options: Mapping[str, Any] | None = None) -> ModelEntry:
        """The entry of a model that is loaded or loads from now on, with these engine options.

        Raises RequestError where it is loaded with others, EngineStoppedError.
        """
        while entry := self._entries.get(name):
            if entry.model is not None and entry.model.engine.died.done():
                self._note_died(entry, entry.model.engine.died.result())
            elif entry.state == "unloading":
                await entry.gone.wait()
            else:
                self._check_options(entry, options or {})
                return entry
        stored = self.store.get(name)
        self.deaths.check(name)
        config = self._make_config(stored.path, options or {})
        entry = self._entries[name] = ModelEntry(name, config)
        entry.load = asyncio.create_task(self._load(entry, config))
        entry.load.add_done_callback(lambda load: self._note_loaded(entry, load))
        return entry

    async def load(
        self, name: str, options: Mapping[str, Any] | None = None, pin: bool | None = None
    ) -> ModelEntry:
        """As `open`, for somebody who wants it loaded however often its engine has died.

        pin: whether it stays for ever from now on; None: as it was.
        """
        name = self._resolve(name)
        self.deaths.clear(name)
        entry = await self.open(name, options)
        if pin is not None:
            (self._pinned.add if pin else self._pinned.discard)(name)
            if entry.model is not None:
                entry.model.keep_alive.pin(pin)
        return entry

    def is_pinned(self, name: str) -> bool:
        """Whether the model of this name stays for ever once it is loaded."""
        return name in self._pinned

    def _check_options(self, entry: ModelEntry, options: Mapping[str, Any]) -> None:
        wanted = self._make_config(Path(entry.config.model_path), options)
        others = [name for name in options if getattr(wanted, name) != getattr(entry.config, name)]
        if others:
            there = ", ".join(f"{name} {getattr(entry.config, name)}" for name in others)
            raise RequestError(
                f"{entry.name} is loaded with {there}; unload it first (quantd unload {entry.name})",
                "options",
            )

    async def unload(self, name: str) -> None:
        """Let the model's requests finish, for a while, then end its engine. Raises ModelNotFoundError.

        Who leaves while waiting does not stop it. A pin goes too, unless it is of the configuration.
        """
        entry = self._entries.get(self._resolve(name))
        if entry is None:
            raise ModelNotFoundError(f"{name} is not loaded")
        if entry.name not in self._always_pinned:
            self._pinned.discard(entry.name)
        await asyncio.shield(self._unloading(entry, self._drain_seconds))

    async def retire(self, name: str) -> None:
        """Unload the model of this name, if there is one, when its requests are done, however long that is.

        Later ones get what the store has by then. For a model whose files are no more.
        """
        entry = self._entries.get(name)
        if entry is not None:
            await asyncio.shield(self._unloading(entry, None))

    async def let_go(self, name: str) -> None:
        """Unload the model, if it is loaded, once no request holds it; returns at once where some do.

        One that is pinned stays. Raises ModelNotFoundError where there is none of this name.
        """
        entry = self._entries.get(self._resolve(name))
        if entry is None or entry.model is None or self.is_pinned(entry.name):
            return
        entry.model.keep_alive.ask(0)
        if not entry.model.num_requests:
            await asyncio.shield(self._unloading(entry, None))

    def _unloading(self, entry: ModelEntry, drain_seconds: float | None) -> asyncio.Task[None]:
        """The end of an entry, which begins now if it has not yet. drain_seconds None: no limit."""
        if entry.unload is None:
            entry.state = "unloading"
            entry.unload = asyncio.create_task(self._drain_and_close(entry, drain_seconds))
        return entry.unload

    async def _drain_and_close(self, entry: ModelEntry, drain_seconds: float | None) -> None:
        if entry.model is not None:
            await _within(drain_seconds, entry.model.wait_idle())
        await self._close(entry)
        _log.info("%s has left memory", entry.name)

    async def suspend(self) -> list[str]:
        """Let go of all GPUs before the machine sleeps; the models unloaded.

        Requests have a moment to end. Loads wait for `resume`, but not for long: it may never come.
        """
        self._sleep.begin()
        held = [entry for entry in self.entries if entry.model is None or entry.model.engine.info.on_gpu]
        await asyncio.gather(*(self._unloading(entry, _SUSPEND_SECONDS) for entry in held))
        return [entry.name for entry in held]

    def resume(self) -> None:
        """The machine is awake again."""
        self._sleep.end()

    async def stats(self, detail: bool = False) -> dict[str, Stats]:
        """The counters of each engine that answers, by model name. detail: also of its requests and pool."""
        models = [entry.model for entry in self.entries if entry.model is not None]
        asked = (asyncio.wait_for(model.engine.stats(detail), _STATS_SECONDS) for model in models)
        found = await asyncio.gather(*asked, return_exceptions=True)
        pairs = zip(models, found, strict=True)
        told = {model.name: stats for model, stats in pairs if isinstance(stats, Stats)}
        for name, stats in told.items():
            self.totals.note(name, stats)
        return told

    async def close(self) -> None:
        """End all engines now."""
        await asyncio.gather(*(self._close(entry) for entry in self.entries))

    def _resolve(self, name: str | None) -> str:
        if name is not None and (name in self._entries or name != "default"):
            return name if name in self._entries else self.store.get(name).name
        if self._entries:
            return next(reversed(self._entries))
        if self._default is not None:
            return self.store.get(self._default).name
        names = [stored.name for stored in self.store.list()]
        if len(names) != 1:
            known = ", ".join(names) or "none; get one with: quantd pull smollm2"
            raise ModelNotFoundError(
                f"no model is loaded, so the request must name one. Models here: {known}"
            )
        return names[0]

    async def _load(self, entry: ModelEntry, config: EngineConfig) -> LoadedModel:
        folder = Path(config.model_path)
        defaults, preset, head = model_sampling(folder), Preset.read(folder), EmbeddingHead.read(folder)
        tokenizer = await asyncio.to_thread(self._load_tokenizer, folder)
        engine = await self._start_engine(entry, config)
        if entry.state == "loading":
            entry.state = "ready"
        engine.died.add_done_callback(lambda died: self._note_died(entry, died.result()))
        clock = asyncio.get_running_loop()
        keep_alive = KeepAlive(self._keep_alive, lambda: self._expire(entry), clock)
        keep_alive.pin(self.is_pinned(entry.name))
        pulse = Pulse(entry.name, engine, self._hang_seconds)
        return LoadedModel(entry.name, folder, engine, tokenizer, defaults, preset, head, keep_alive, pulse)

    def _expire(self, entry: ModelEntry) -> None:
        if entry.gone.is_set():
            return
        _log.info("%s is unloaded: it was idle for its time", entry.name)
        self._unloading(entry, None)

    async def _start_engine(self, entry: ModelEntry, config: EngineConfig) -> Engine:
        """Start an engine, one at a time, in place of idle models where memory is short."""

        async def make_room(error: CapacityError) -> Allowance:
            await self._room.make(error, entry.say)
            entry.say("")
            return self.allowance(await self.stats())

        if self._turn.locked():
            entry.say("waits for another model to be loaded")
        async with self._turn:
            entry.say("")
            await self._room.take_place(entry.say)
            while True:
                await self._sleep.over()
                allowed = msgspec.structs.replace(config, allowance=self.allowance(await self.stats()))
                try:
                    return await self._start(allowed, entry.report, make_room)
                except NoRoomError:
                    raise
                except CapacityError as error:
                    await self._room.make(error, entry.say)

    def allowance(self, stats: Mapping[str, Stats]) -> Allowance:
        """What a model to come may take beside those that are here. stats: see the method."""
        loaded = [entry.model for entry in self.entries if entry.model is not None]
        infos = [(model.engine.info, stats.get(model.name, Stats())) for model in loaded]
        promised = sum(info.kv_bytes - info.kv_bytes_touched(now) for info, now in infos)
        if self._max_memory is None:
            return Allowance(promised=promised)
        taken = sum(info.weight_bytes + info.kv_bytes for info, _ in infos)
        return Allowance(promised=promised, limit=max(self._max_memory - taken, 0))

    def _residents(self) -> list[Resident]:
        return [self._resident(entry, entry.model) for entry in self.entries if entry.model is not None]

    def _resident(self, entry: ModelEntry, model: LoadedModel) -> Resident:
        return Resident(
            name=entry.name,
            num_bytes=model.engine.info.weight_bytes + model.engine.info.kv_bytes,
            on_gpu=model.engine.info.on_gpu,
            # Who waited for it will hold it in an instant.
            num_requests=model.num_requests + len(entry.waiting),
            pinned=self.is_pinned(entry.name),
            used=model.used,
            wait_idle=model.wait_idle,
        )

    def _note_loaded(self, entry: ModelEntry, load: asyncio.Task[LoadedModel]) -> None:
        """A failed load leaves no entry, so the next request tries again."""
        if load.cancelled() or load.exception() is not None:
            if not load.cancelled():
                _log.error("%s cannot be loaded: %s", entry.name, load.exception())
            if not load.cancelled() and isinstance(load.exception(), EngineDiedError):
                self.deaths.note(entry.name, str(load.exception()))
            self._remove(entry)
            return
        info = load.result().engine.info
        _log.info(
            "%s is loaded: %s on %s kernels, %s KV cache of %d tokens",
            entry.name,
            info.architecture,
            info.backend,
            info.kv_dtype,
            info.kv_tokens,
        )

    def _note_died(self, entry: ModelEntry, reason: str) -> None:
        """An engine that ends by itself leaves no entry either."""
        if entry.state == "ready" and not entry.gone.is_set():
            self.deaths.note(entry.name, reason)
            again = (
                "it is not started again"
                if entry.name in self.deaths.stopped
                else "the next request starts it"
            )
            _log.error("%s: %s; %s", entry.name, reason, again)
            self._remove(entry)

    async def _close(self, entry: ModelEntry) -> None:
        entry.state = "unloading"
        entry.load.cancel()
        await asyncio.wait({entry.load})
        if entry.model is not None:
            await self._last_stats(entry.model)
            await entry.model.engine.close()
        self._remove(entry)
        # What its requests leave are cycles that hold its tokenizer: megabytes, but few objects, which the
        # collector would let lie. In a moment, when nobody waits for its end any more.
        asyncio.get_running_loop().call_later(_GARBAGE_SECONDS, gc.collect)

    async def _last_stats(self, model: LoadedModel) -> None:
        """Note what an engine has counted before it goes, unless it is in a long step."""
        with contextlib.suppress(EngineDiedError, TimeoutError):
            self.totals.note(model.name, await asyncio.wait_for(model.engine.stats(), _LAST_STATS_SECONDS))

    def _remove(self, entry: ModelEntry) -> None:
        if not entry.gone.is_set():
            self.totals.end(entry.name)
        entry.gone.set()
        if entry.model is not None:
            entry.model.keep_alive.close()
            entry.model.pulse.stop()
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        self.on_gone(entry)


async def _within(seconds: float | None, awaitable: Awaitable[object]) -> None:
    """Wait for something, but no longer than this. None: as long as it takes."""
    try:
        async with asyncio.timeout(seconds):
            await awaitable
    except TimeoutError:
        pass
