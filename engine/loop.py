"""The step loop, and the engine process around it: `python -m quantd.engine.loop FD`.

FD is one end of a socketpair. The first frame to come is an EngineConfig; Loading frames answer it,
then ModelInfo or Failed; after that ToEngine and FromEngine frames. Torch is imported by the runner.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

import msgspec

from quantd.engine.config import Allowance, EngineConfig
from quantd.engine.connection import Connection
from quantd.engine.disk_cache import FromDisk, WeightsRead, open_disk_cache
from quantd.engine.disk_reader import Arrived
from quantd.engine.disk_writer import Written
from quantd.engine.errors import CapacityError, RankError
from quantd.engine.faults import describe, is_gpu_fault, is_out_of_memory, kind_of
from quantd.engine.grammar import NO_GRAMMARS, Compiled, GrammarCompiler, Grammars, ModelGrammars
from quantd.engine.log_lines import write_to_stderr
from quantd.engine.messages import (
    Abort,
    Add,
    Drop,
    Failed,
    Forget,
    FromEngine,
    GetStats,
    Loading,
    Retry,
    Save,
    Saved,
    Short,
    Started,
    ToEngine,
)
from quantd.engine.outbox import HOLD_SECONDS, Outbox
from quantd.engine.parent import die_with_parent
from quantd.engine.plan import Plan, Runner
from quantd.engine.prefix_cache import block_keys
from quantd.engine.ranks import Fail
from quantd.engine.request import Request, TokenEvent
from quantd.engine.scheduler import Scheduler
from quantd.engine.stepping import stepping_of
from quantd.kernels.errors import QuantdError

Progress: TypeAlias = Callable[[int, int], None]
MakeRoom: TypeAlias = Callable[[CapacityError], Allowance]
BuildRunner: TypeAlias = Callable[[EngineConfig, Progress, Fail, MakeRoom], Runner]
"""Progress is told bytes loaded and in all; Fail, from any thread, why the engine can do no more; MakeRoom
what is wanting before the load, and returns when there may be more.
"""

logger = logging.getLogger(__name__)


class GrammarReady(NamedTuple):
    """A request's grammar is compiled, or cannot be."""

    request_id: str
    compiled: Compiled


Incoming: TypeAlias = ToEngine | GrammarReady | FromDisk


class EngineLoop:
    """Receive, schedule, run, update, emit; with nothing to do it waits for its inbox.

    The inbox holds what the daemon says, what grammars are compiled to, and what came from the disk or is
    written there. hold_seconds: see Outbox.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: SimpleQueue[Incoming],
        send: Callable[[FromEngine], None],
        hold_seconds: float = HOLD_SECONDS,
        grammars: Grammars = NO_GRAMMARS,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._stepping = stepping_of(scheduler, runner)
        self._disk = scheduler.disk
        self._inbox = inbox
        self._send = send
        self._outbox = Outbox(send, hold_seconds)
        self._grammars = grammars
        self._failed_before = False

    def step(self) -> None:
        """One pass. Raises what the runner raised: a RankError, a GPU's fault, or anything twice in a row."""
        events = [event for message in self._receive() for event in self._handle(message)]
        if self.scheduler.has_work:
            plan = self._stepping.next_plan()
            if admitted := self.scheduler.take_admitted():
                self._send(Started(admitted))
            self._outbox.before(plan)
            events += self._compute(plan)
        self._outbox.add(events)

    def _receive(self) -> Iterator[Incoming]:
        """All that has come; the first of it is waited for while there is no work.

        Work of the runner's own, if it has some, is done meanwhile, and then what is to be written to disk.
        """
        if not self.scheduler.has_work:
            self._outbox.flush()
            while self._inbox.empty() and (self.runner.prepare() or self._disk.turn(self.scheduler.cache)):
                pass
            yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _handle(self, message: Incoming) -> list[TokenEvent]:
        match message:
            case Add(request):
                event = self._add(request)
            case GrammarReady(request_id, compiled):
                event = self.scheduler.release(request_id, compiled)
            case Abort(request_id):
                event = self.scheduler.abort(request_id)
            case _:
                event = None
                self._attend(message)
        return [] if event is None else [event]

    def _attend(self, message: FromDisk | Forget | Drop | Save | GetStats | Retry) -> None:
        match message:
            case Arrived() | Written() | WeightsRead():
                for state in self._disk.heard(message, self.scheduler.cache):
                    self.scheduler.resume(state)
            case Forget(prompt, salt):
                self._forget(block_keys(prompt, self.scheduler.cache.block_size, salt))
            case Drop(keys):
                self._forget(keys)
            case Save(seconds):
                self._disk.flush(self.scheduler.cache, seconds)
                self._send(Saved())
            case GetStats(detail):
                self._send(self.scheduler.stats(detail))
            case Retry():
                raise AssertionError("room is made before a model is loaded")

    def _add(self, request: Request) -> TokenEvent | None:
        event = self.scheduler.add(request)
        if event is None and request.sampling.grammar is not None:
            self._grammars.compile(
                request.sampling, lambda compiled: self._inbox.put(GrammarReady(request.id, compiled))
            )
        return event

    def _forget(self, keys: list[bytes] | None) -> None:
        self.scheduler.cache.forget(keys)
        self._disk.forget(keys)

    def _compute(self, plan: Plan) -> list[TokenEvent]:
        begun = time.monotonic()
        try:
            output = self._stepping.run(plan)
        except Exception as error:
            return self._fail(plan, error)
        self._disk.note_step(plan.num_tokens, time.monotonic() - begun)
        self._failed_before = False
        return self.scheduler.update(plan, output)

    def _fail(self, plan: Plan, error: Exception) -> list[TokenEvent]:
        """Plan a smaller step where memory was wanting; else end the requests of the step.

        One failure may be theirs; a second one is the runner's, and so is a GPU's.
        """
        if is_out_of_memory(error) and self.scheduler.put_off(plan):
            logger.warning(
                "a step of %d tokens found too little memory: %s", plan.num_tokens, describe(error)
            )
            return []
        logger.error("a step failed", exc_info=error)
        events = self.scheduler.fail(plan, f"the step failed: {describe(error)}")
        if self._failed_before or isinstance(error, RankError) or is_gpu_fault(error):
            self._outbox.add(events)
            raise error
        self._failed_before = True
        return events


def serve(fd: int, build_runner: BuildRunner) -> None:
    """Be an engine process on a socket's descriptor, until the other side is gone or a fault ends it."""
    die_with_parent()
    # Ctrl-C reaches the whole terminal; what it means is the daemon's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=fd))
    inbox: SimpleQueue[Incoming] = SimpleQueue()
    sending = threading.Lock()

    def send(message: FromEngine) -> None:
        with sending:
            connection.send(message)

    def fail(failed: Failed) -> None:
        send(failed)
        os._exit(1)

    def make_room(error: CapacityError) -> Allowance:
        send(Short(error.shortage, str(error), error.urgent, error.on_gpu))
        retry = inbox.get()
        assert isinstance(retry, Retry), f"{retry} came while room was being made"
        return retry.allowance

    try:
        config = connection.receive(msgspec.msgpack.Decoder(EngineConfig))
        threading.Thread(target=_read, args=(connection, inbox), name="inbox", daemon=True).start()
        runner = build_runner(config, lambda done, total: send(Loading(done, total)), fail, make_room)
        send(runner.info)
        grammars = ModelGrammars(GrammarCompiler(Path(config.model_path), runner.info.vocab_size))
        disk = open_disk_cache(config, runner, inbox.put)
        loop = EngineLoop(Scheduler(config, runner.info, disk), runner, inbox, send, grammars=grammars)
        # What is here now stays: looking through it again and again for garbage would hold steps up.
        gc.collect()
        gc.freeze()
        while True:
            loop.step()
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:
        if not isinstance(error, QuantdError):
            logger.exception("the engine process ends")
        # At once: on its way out Python would free the model. That may take for ever, as a group of ranks
        # waits while steps that were recorded with it are there, and it may fail on a GPU that had a fault.
        try:
            send(Failed(kind=kind_of(error), message=describe(error)))
        finally:
            os._exit(1)


def _read(connection: Connection, inbox: SimpleQueue[Incoming]) -> None:
    """Move messages to the inbox. The end of them ends the process, whatever it is in the middle of."""
    decoder = msgspec.msgpack.Decoder(ToEngine)
    try:
        while True:
            inbox.put(connection.receive(decoder))
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception:
        logger.exception("the engine process got what it cannot read")
        os._exit(1)


def _build_runner(config: EngineConfig, progress: Progress, fail: Fail, make_room: MakeRoom) -> Runner:
    # Torch takes seconds to import; by now the parent is watched and told of what goes wrong.
    from quantd.engine.runner import build_runner

    return build_runner(config, progress, fail, make_room)


if __name__ == "__main__":
    write_to_stderr("engine %(process)d: %(message)s")
    serve(int(sys.argv[1]), _build_runner)
