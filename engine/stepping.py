"""How plans come to be run: one after another, or each started before the one before it has ended.

Between two steps an engine schedules, draws and tells what was drawn, all on the CPU. A GPU need not wait
for that: what a step computes is known but for the tokens that the one before it draws, and those are on the
GPU already. So the next step is started while one runs; should a request have ended meanwhile, its part of it
is thrown away.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from quantd.engine.faults import is_out_of_memory
from quantd.engine.plan import AheadRunner, Plan, Runner, Started, StepOutput
from quantd.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Stepping(Protocol):
    """Calls alternate: next_plan, then run."""

    def next_plan(self) -> Plan:
        """What is computed next; may be empty."""

    def run(self, plan: Plan) -> StepOutput:
        """What that gives. Raises what the runner raises."""


class InTurn:
    """A step begins when the one before it is over and taken in."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner

    def next_plan(self) -> Plan:
        """See Stepping."""
        return self._scheduler.schedule()

    def run(self, plan: Plan) -> StepOutput:
        """See Stepping."""
        return self._runner.run(plan)


class OneAhead:
    """While a step runs, the next one is started, where it can be foreseen."""

    def __init__(self, scheduler: Scheduler, runner: AheadRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._foreseen: _Flight | None = None
        self._running: _Flight | None = None

    def next_plan(self) -> Plan:
        """See Stepping."""
        self._running, self._foreseen = self._foreseen, None
        if self._running is not None:
            plan = self._scheduler.confirm(self._running.plan)
            if plan.entries:
                return plan
            self._running = None
        return self._scheduler.schedule()

    def run(self, plan: Plan) -> StepOutput:
        """See Stepping."""
        running = self._running or _Flight(plan, self._runner.start(plan))
        following = self._start_ahead(plan, running)
        output = running.output_of(plan)
        self._foreseen = following
        return output

    def _start_ahead(self, plan: Plan, running: _Flight) -> _Flight | None:
        """The step behind one that runs, unless there is no memory for both: then the first still counts."""
        ahead = self._scheduler.ahead(plan)
        if ahead is None:
            return None
        try:
            return _Flight(ahead, self._runner.start(ahead, running.started))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.info("no step was started ahead: %s", error)
            return None


@dataclass(frozen=True)
class _Flight:
    """A step under way, and the plan that it was started with."""

    plan: Plan
    started: Started

    def output_of(self, plan: Plan) -> StepOutput:
        """What the step gives for a plan that holds some of its entries."""
        outputs = self.started.result().entries
        by_request = {entry.request: output for entry, output in zip(self.plan.entries, outputs, strict=True)}
        return StepOutput(tuple(by_request[entry.request] for entry in plan.entries))


def stepping_of(scheduler: Scheduler, runner: Runner) -> Stepping:
    """The best that a runner can do."""
    return OneAhead(scheduler, runner) if isinstance(runner, AheadRunner) else InTurn(scheduler, runner)
