"""Fuzz the targets with atheris, one after the other: `python tests/fuzz/run.py --seconds 60 [TARGET ...]`.

Each starts from its corpus and the bodies of the handed cases, in a process of its own, for its share of the
time. Whatever crashes lies below build/fuzz then, to be added to the corpus once it is understood.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
OUTPUT = TESTS.parent / "build" / "fuzz"
# A step of a hostile template takes longer than any other input may.
LIMITS = ["-timeout=20", "-rss_limit_mb=3000", "-max_len=8192", "-print_final_stats=1", "-verbosity=0"]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=int, default=60, help="for all targets together")
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    arguments.add_argument("targets", nargs="*")
    given = arguments.parse_args()
    if given.one is not None:
        fuzz(given.one, given.seconds)
    from fuzz_targets import TARGETS

    chosen = given.targets or list(TARGETS)
    share = max(given.seconds // len(chosen), 1)
    failed = [name for name in chosen if not run(name, share)]
    print(f"crashes: {', '.join(failed) or 'none'}")
    return bool(failed)


def run(name: str, seconds: int) -> bool:
    """Fuzz a target in a process of its own; whether it went well. Its log is build/fuzz/NAME.log."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--seconds", str(seconds), "--one", name]
    path = OUTPUT / f"{name}.log"
    with path.open("wb") as log:
        status = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"RUST_BACKTRACE": "0"}
        ).returncode
    lines = path.read_text(errors="replace").splitlines()
    done = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
    print(f"{name}: {done} inputs in {seconds} s, {'well' if status == 0 else 'CRASHED'}", flush=True)
    return status == 0


def fuzz(name: str, seconds: int) -> None:
    """Fuzz in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["quantd", "jinja2", "llguidance"]):
        from fuzz_targets import CORPUS, TARGETS, refuses, words
    found = OUTPUT / name
    found.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "words.dict").write_text("".join(f'"{word}"\n' for word in words()))
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-dict={OUTPUT}/words.dict",
            f"-artifact_prefix={OUTPUT}/{name}-",
            *LIMITS,
            str(found),
            *filter(os.path.isdir, [str(CORPUS / name)]),
        ],
        lambda data: refuses(TARGETS[name], data) or None,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
