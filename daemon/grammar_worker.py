"""The process that tries grammars before an engine gets them: `python -m quantd.daemon.grammar_worker FD`.

Text from outside may be made to exhaust a compiler's stack, memory or time, and llguidance does not bound
all of them. So grammars are compiled here first, as the engine will, but with less stack: what ends or
outstays this process never reaches the engine.
"""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path

import msgspec

from quantd.daemon.grammar_messages import Checked, CheckGrammar
from quantd.engine.connection import Connection
from quantd.engine.errors import RequestError
from quantd.engine.grammar import STACK_BYTES, GrammarCompiler, start_thread
from quantd.engine.parent import die_with_parent
from quantd.engine.plan import RequestState
from quantd.engine.request import Request, SamplingParams
from quantd.engine.token_masks import TokenMasks

MEMORY_BYTES = 4 << 30


class Tester:
    """Compiles grammars, for one model at a time."""

    def __init__(self) -> None:
        self._model: tuple[str, int] | None = None
        self._compiler: GrammarCompiler
        self._masks = TokenMasks(0)

    def check(self, request: CheckGrammar) -> Checked:
        """Compile a grammar and find its first mask."""
        model = (request.folder, request.vocab_size)
        if model != self._model:
            self._model, self._compiler = model, GrammarCompiler(Path(request.folder), request.vocab_size)
        # Which id ends an answer does not matter here.
        sampling = SamplingParams(grammar=request.grammar, stop_token_ids=(0,))
        state = RequestState(Request(id="", prompt=[0], sampling=sampling))
        try:
            sampling.validate(request.vocab_size)
            state.matcher = self._compiler.matcher(sampling)
        except RequestError as error:
            return Checked(str(error))
        return Checked(self._masks.start([state]).result().errors.get(state.id))


def serve(fd: int) -> None:
    """Answer on a socket's descriptor until the other side is gone."""
    connection = Connection(socket.socket(fileno=fd))
    decoder, tester = msgspec.msgpack.Decoder(CheckGrammar), Tester()
    try:
        while True:
            connection.send(tester.check(connection.receive(decoder)))
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    die_with_parent()
    for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))
    start_thread(lambda: serve(int(sys.argv[1])), "grammars", STACK_BYTES // 2).join()
