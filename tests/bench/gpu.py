"""The GPU path: every kernel checked and timed, then the engine on random models of 8B and 70B-layer shape.

python tests/bench/gpu.py [--only SECTION ...] [--dtype TYPE] [--json] [--dry-run]

One table, with the goals; all of it takes up to nine minutes. Each section runs in a process of its own, for
so long at most, and what it has measured by then counts. Kernels are checked in fp16 and in bf16, everything
else is measured in one of them. Without an NVIDIA GPU nothing is measured. --dry-run goes through everything
in Triton's interpreter, on the CPU and at tiny sizes; its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection

from sides.report import Row, print_rows


@dataclass(frozen=True)
class Section:
    """A function of a module in gpu_sides that yields measures, and the seconds that it has."""

    module: str
    function: str
    seconds: float


SECTIONS = {
    "check": Section("checks", "checks", 140),
    "matmul": Section("products", "products", 90),
    "attention": Section("attentions", "attentions", 70),
    "rows": Section("others", "others", 50),
    "8B": Section("engines", "small_model", 120),
    "70B": Section("engines", "large_model", 70),
}


@dataclass(frozen=True)
class Missing:
    """A measure that was not taken, and why. failed: it ought to have been."""

    measure: str
    reason: str
    failed: bool = True


Outcome = Row | Missing


def measure(section: Section, dtype: str, dry: bool) -> Iterator[Outcome]:
    """Take a section's measures, as many as its time allows; one that fails does not end it."""
    import torch
    from gpu_sides.setup import Setup, Skipped

    end = time.monotonic() + section.seconds
    with torch.inference_mode():
        for one in _measures(section)(Setup.here(dtype, dry)):
            if time.monotonic() > end and not dry:
                yield Missing(one.name, f"the section's {section.seconds:.0f} s are over", failed=False)
                continue
            try:
                yield one.run()
            except Skipped as reason:
                yield Missing(one.name, str(reason), failed=False)
            except Exception as error:  # whatever a kernel, a driver or a compiler throws
                traceback.print_exc()
                yield Missing(one.name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _measures(section: Section) -> Callable[..., Iterator[object]]:
    from importlib import import_module

    function: Callable[..., Iterator[object]] = getattr(
        import_module(f"gpu_sides.{section.module}"), section.function
    )
    return function


def measure_apart(name: str, dtype: str) -> Iterator[Outcome]:
    """A section in a process of its own: a fault of the GPU, or a hang, ends no other section."""
    section = SECTIONS[name]
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcomes, args=(section, dtype, theirs), daemon=True)
    process.start()
    theirs.close()
    end = time.monotonic() + 1.5 * section.seconds + 30  # a last measure, and starting, may take longer
    try:
        while ours.poll(max(end - time.monotonic(), 0)):
            yield ours.recv()
        yield Missing(name, "it hung and was ended")
    except EOFError:
        process.join()
        if process.exitcode:
            yield Missing(name, f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send_outcomes(section: Section, dtype: str, connection: Connection) -> None:
    for outcome in measure(section, dtype, dry=False):
        connection.send(outcome)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16", help="of what is timed")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes in the interpreter")
    return parser.parse_args()


def _outcomes(names: Sequence[str], dtype: str, dry: bool) -> Iterator[Outcome]:
    for name in names:
        print(f"measuring: {name} ...", file=sys.stderr, flush=True)
        for outcome in measure(SECTIONS[name], dtype, dry) if dry else measure_apart(name, dtype):
            print(f"  {_line(outcome)}", file=sys.stderr, flush=True)
            yield outcome


def _line(outcome: Outcome) -> str:
    if isinstance(outcome, Missing):
        return f"{outcome.measure}: not measured: {outcome.reason}"
    return f"{outcome.measure}: {outcome.figure:.4g} {outcome.unit}"


def _title(dtype: str, dry: bool) -> str:
    import torch

    if dry:
        return "dry run, the figures say nothing"
    from quantd.kernels.gpu.report import collect

    report = collect()
    return (
        f"{torch.cuda.get_device_name(0)}, {date.today()}, driver {report.driver}, torch {report.torch}, "
        f"triton {report.triton}, {dtype}"
    )


def _print(title: str, rows: Sequence[Row], missing: Sequence[Missing], as_json: bool) -> None:
    if as_json:
        entries = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps({"title": title, "rows": entries, "missing": list(map(asdict, missing))}, indent=2))
        return
    print_rows(title, rows)
    for one in missing:
        print(_line(one))


def main() -> int:
    """1 where a measure failed or a kernel is wrong; goals that are not met are no failure."""
    options = _parse()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        from gpu_sides.interpreter import as_on_a_gpu

        as_on_a_gpu()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("no NVIDIA GPU here (or none that torch can use): nothing measured")
        return 0
    outcomes = list(_outcomes(options.only, options.dtype, options.dry_run))
    rows = [outcome for outcome in outcomes if isinstance(outcome, Row)]
    missing = [outcome for outcome in outcomes if isinstance(outcome, Missing)]
    _print(_title(options.dtype, options.dry_run), rows, missing, options.json)
    wrong = [row for row in rows if row.better == "less" and row.met is False]
    return 1 if wrong or any(one.failed for one in missing) else 0


if __name__ == "__main__":
    sys.exit(main())
