"""Which backend computes: the fastest that this machine can build, or the one asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from quantd.kernels.errors import QuantdError
from quantd.kernels.ops import Ops
from quantd.kernels.reference import Activations, ReferenceOps


def select_ops(
    backend: Literal["auto", "reference", "cpu"] = "auto",
    activations: Activations = "auto",
    threads: int = 0,
    cache: Path | None = None,
) -> Ops:
    """The ops of a backend. threads: of the CPU backend, 0 for one a physical core; cache: the folder of
    its compiled library, None for the user's cache folder.

    "auto" takes the CPU backend and falls back to the reference; a line in the log says why.
    Raises QuantdError where "cpu" was asked for and cannot be built.
    """
    if backend == "reference":
        return ReferenceOps(activations)
    from quantd.kernels.cpu import load_ops  # compiles C on the first call

    ops: Ops | None = load_ops(activations, threads, cache=cache)
    if ops is not None:
        return ops
    if backend == "cpu":
        raise QuantdError("the cpu backend cannot be built here: install a C compiler, or use backend auto")
    return ReferenceOps(activations)
