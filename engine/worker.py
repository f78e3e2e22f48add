"""A rank that is not rank 0: `python -m quantd.engine.worker FD`, a child of the engine process.

FD is one end of a socketpair (see quantd.engine.rank_messages). It loads its part of the model, computes
its part of each step, and ends with the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from quantd.engine.connection import Connection
from quantd.engine.errors import RankError
from quantd.engine.faults import describe, kind_of
from quantd.engine.log_lines import write_to_stderr
from quantd.engine.messages import Failed
from quantd.engine.parent import die_with_parent
from quantd.engine.rank_messages import (
    Allocate,
    Prepare,
    Prepared,
    RankReady,
    Reserve,
    Reserved,
    StartRank,
    Step,
    ToRank,
)

if TYPE_CHECKING:
    from quantd.engine.model_part import ModelPart

T = TypeVar("T")

logger = logging.getLogger(__name__)


def serve(fd: int) -> None:
    """Be a rank on a socket's descriptor, until rank 0 is gone."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=fd))
    try:
        _run(connection)
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:
        # The error holds the rank's part while this block lasts. To free that could take for ever, as a group
        # waits while steps that were recorded with it are there.
        try:
            _tell(error, connection)
            _wait_for_end(connection)
        finally:
            os._exit(1)


def _run(connection: Connection) -> None:
    start = _receive(connection, StartRank)
    # Torch takes seconds to import; by now it would be known if the engine were gone.
    from quantd.engine.model_part import load_part
    from quantd.engine.models.architectures import decoder_spec
    from quantd.quant.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(Path(start.config.model_path))
    loaded = load_part(start, decoder_spec(checkpoint.config, start.config.max_model_len), checkpoint)
    connection.send(loaded.memory)
    part = loaded.allocate(_receive(connection, Allocate).num_blocks)
    connection.send(RankReady())
    follow(connection, part)


def follow(connection: Connection, part: ModelPart) -> None:
    """Do as rank 0 says. Raises EOFError when it is gone."""
    from quantd.engine.step_frame import batch_of  # needs torch

    decoder = msgspec.msgpack.Decoder[Step | Prepare | Reserve](Step | Prepare | Reserve)
    while True:
        match connection.receive(decoder):
            case Step() as step:
                part.follow(batch_of(step))
            case Prepare():
                connection.send(Prepared(part.prepare()))
            case Reserve(num_bytes):
                connection.send(Reserved(part.shortage(num_bytes)))


def _tell(error: Exception, connection: Connection) -> None:
    if isinstance(error, RankError):
        # Whose fault that was, and that all is over, is rank 0's to say.
        logger.info("%s", error)
    else:
        logger.error("a rank cannot go on", exc_info=error)
        connection.send(Failed(kind_of(error), describe(error)))


def _receive(connection: Connection, kind: type[T]) -> T:
    return connection.receive(msgspec.msgpack.Decoder(kind))


def _wait_for_end(connection: Connection) -> None:
    """Return when rank 0 has hung up; steps that it still sends are of no use."""
    decoder = msgspec.msgpack.Decoder[ToRank](ToRank)
    with suppress(EOFError, ConnectionError):
        while True:
            connection.receive(decoder)


if __name__ == "__main__":
    write_to_stderr("rank %(process)d: %(message)s")
    serve(int(sys.argv[1]))
