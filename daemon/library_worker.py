"""One change of the store in a process of its own, which another can end at any time.

Making a model of a GGUF file takes seconds of Python, and a download as long as it takes; neither is for
the process that answers. A job comes as a line of JSON on stdin, steps and the end go to stdout as lines.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from quantd.daemon.derive import Changes, FileSource, ModelSource
from quantd.daemon.endings import end_tidily
from quantd.daemon.errors import DiskFullError, ModelNotFoundError, StoreError
from quantd.daemon.preset import Preset
from quantd.daemon.sources.source import Source
from quantd.daemon.sources.spec import parse_source
from quantd.daemon.store import Store
from quantd.kernels.errors import QuantdError
from quantd.quant.errors import CheckpointError, UnsupportedModelError

_STEP_SECONDS = 0.1
# For clearing up once the job is called off.
_END_SECONDS = 5.0


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Fetch what `spec` names (see `parse_source`)."""

    spec: str


class Derive(msgspec.Struct, frozen=True, tag="derive"):
    """Make a model of another."""

    base: str


class Build(msgspec.Struct, frozen=True, tag="build"):
    """Make a model of files: names that they are to have, and where they lie."""

    files: dict[str, str]


class Job(msgspec.Struct, frozen=True):
    """root: the store's folder. name: of the model, None for the source's own. See `Store.add`."""

    root: str
    what: Pull | Derive | Build
    name: str | None = None
    preset: Preset = Preset()
    template: str | None = None
    replace: bool = False


class Step(msgspec.Struct, frozen=True, tag="step"):
    """`done` of `total` bytes of a stage, as a source reports them."""

    stage: str
    done: int
    total: int | None


class Added(msgspec.Struct, frozen=True, tag="added"):
    """The model is there."""

    name: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why it is not; kind: the error's class."""

    kind: str
    message: str

    def error(self) -> QuantdError:
        """The error as it was."""
        return _ERRORS.get(self.kind, StoreError)(self.message)


Report = Step | Added | Refused
_ERRORS: dict[str, type[QuantdError]] = {
    error.__name__: error
    for error in (ModelNotFoundError, StoreError, DiskFullError, CheckpointError, UnsupportedModelError)
}


def run(job: Job, report: Reporter) -> None:
    """Do a job."""
    store = Store(Path(job.root))
    try:
        changes = Changes(job.preset, job.template)
        model = store.add(_source(job.what, store), job.name, report.step, changes, job.replace)
        report.send(Added(model.name))
    # The boundary of the process: whoever started it is told.
    except Exception as error:
        report.send(Refused(type(error).__name__, str(error)))


def _source(what: Pull | Derive | Build, store: Store) -> Source:
    match what:
        case Pull(spec):
            return parse_source(spec)
        case Derive(base):
            model = store.get(base)
            return ModelSource(model.name, model.path)
        case Build(files):
            return FileSource({name: Path(path) for name, path in files.items()})


class Reporter:
    """Sends reports, of many steps of one stage only a few a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = ("", 0.0)

    def step(self, stage: str, done: int, total: int | None) -> None:
        """Tell of a step, unless one of the same stage was told a moment ago; the last is always told."""
        now = time.monotonic()
        is_last = total is not None and done >= total
        if stage == self._last[0] and now < self._last[1] + _STEP_SECONDS and not is_last:
            return
        self._last = (stage, now)
        self.send(Step(stage, done, total))

    def send(self, report: Report) -> None:
        """Tell of something."""
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()


def _end_with_the_other_side() -> None:
    """End all that was started for the job once nobody holds the other end of stdin."""
    while os.read(0, 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Read a job and do it. What it has begun goes with it where it is ended."""
    end_tidily()
    job = msgspec.json.decode(_read_line(), type=Job)
    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    run(job, Reporter())


def _read_line() -> bytes:
    """A line of stdin; no reader of Python's is used, which would hold a lock at the end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            break
        line += part
    return bytes(line)


if __name__ == "__main__":
    main()
