"""Rank 0 of several, which all compute every step together: what the others are told, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from quantd.engine.batch import Batch
from quantd.engine.errors import StepMemoryError
from quantd.engine.faults import is_out_of_memory
from quantd.engine.messages import ModelInfo
from quantd.engine.model_part import ModelPart
from quantd.engine.models.decoder import Decoder
from quantd.engine.plan import AheadRunner, Plan, Runner, Started, StepOutput
from quantd.engine.rank_messages import Prepare, Prepared, Reserve, Reserved
from quantd.engine.ranks import Ranks
from quantd.engine.step_frame import step_of


class LeadingPart:
    """Rank 0's ModelPart. The other ranks are told of what it does before it begins."""

    def __init__(self, part: ModelPart, ranks: Ranks) -> None:
        self.ranks = ranks
        self._part = part
        self._reserved = 0
        self._awaited = 0

    @property
    def decoder(self) -> Decoder:
        """Rank 0's."""
        return self._part.decoder

    @property
    def in_step(self) -> bool:
        """Whether the other ranks have all that they wait for, so that a step can be left as it is."""
        return self._awaited == 0

    @property
    def time_limit(self) -> float | None:
        """See ModelPart."""
        return self._part.time_limit

    def forward(self, batch: Batch, drawn: Tensor | None = None) -> Tensor:
        """See ModelPart. Raises StepMemoryError."""
        self._reserve(self._part.step_bytes(batch))
        step = step_of(batch)
        self._awaited = 1 + self._part.num_shared_logits(batch)
        self.ranks.send(step)
        hidden = self._part.forward(batch, drawn)
        self._awaited -= 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See ModelPart."""
        logits = self._part.logits(hidden)
        # Where rank 0 has the output matrix alone, nobody waits for it.
        self._awaited = max(self._awaited - 1, 0)
        return logits

    def reserve_again(self) -> None:
        """Ask every rank for memory before the next step, whatever it had before."""
        self._reserved = 0

    def prepare(self) -> bool:
        """See Runner: every rank its part, for what is left differs from stage to stage."""
        # Recording has its own memory, for which what is kept for steps may be given up.
        self.reserve_again()
        self._awaited = 1
        self.ranks.send(Prepare())
        more = self._part.prepare()
        answers = self.ranks.collect(Prepared, self.time_limit)
        self._awaited = 0
        return any([more, *(answer.more for answer in answers)])

    def _reserve(self, num_bytes: int) -> None:
        """Ask every rank for the memory of a step before any begins: in the middle none can stop without the
        others. Nobody is asked while all have had as much since it was last wanting. Raises StepMemoryError.
        """
        if num_bytes <= self._reserved:
            return
        self._awaited = 1
        self.ranks.send(Reserve(num_bytes))
        own, others = self._part.shortage(num_bytes), self.ranks.collect(Reserved, self.time_limit)
        self._awaited = 0
        shortages = [text for text in (own, *(other.shortage for other in others)) if text is not None]
        self._reserved = 0 if shortages else num_bytes
        if shortages:
            raise StepMemoryError(f"a rank has not the {num_bytes} bytes that a step takes: {shortages[0]}")

    def close(self) -> None:
        """End the other ranks, and let go of what was recorded with them."""
        try:
            self._part.close()
        finally:
            self.ranks.close()


class LeadingRunner:
    """A runner over `part`.

    Raises what says that memory was wanting where the ranks are in step: before the others were told, or on
    rank 0 behind the last exchange. They have then written keys and values that the step, done again, writes
    again. Raises RankError for all else: the ranks are out of step.
    """

    pool_blocks = None

    def __init__(self, runner: Runner, part: LeadingPart) -> None:
        self._runner = runner
        self._part = part

    @property
    def info(self) -> ModelInfo:
        """See Runner."""
        return self._runner.info

    def run(self, plan: Plan) -> StepOutput:
        """See Runner."""
        with self._together():
            return self._runner.run(plan)

    def prepare(self) -> bool:
        """See Runner."""
        with self._together():
            return self._runner.prepare()

    def close(self) -> None:
        """See LeadingPart."""
        self._part.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) and self._part.in_step:
                self._part.reserve_again()
                raise
            raise self._part.ranks.explain(error) from error


class LeadingAheadRunner(LeadingRunner):
    """The same over an AheadRunner. What a step gives, ranks that have started it are in step."""

    def __init__(self, runner: AheadRunner, part: LeadingPart) -> None:
        super().__init__(runner, part)
        self._ahead_runner = runner

    def start(self, plan: Plan, before: Started | None = None) -> Started:
        """See AheadRunner."""
        with self._together():
            return self._ahead_runner.start(plan, before)


def leading(runner: Runner, part: LeadingPart) -> LeadingRunner:
    """A runner over a LeadingPart as one that knows of the ranks."""
    if isinstance(runner, AheadRunner):
        return LeadingAheadRunner(runner, part)
    return LeadingRunner(runner, part)
