"""The op table on a CPU: C kernels compiled once on this machine, called through ctypes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from quantd.kernels.cpu.build import BuildError, Variant, build
from quantd.kernels.cpu.library import Library
from quantd.kernels.cpu.ops import CpuOps
from quantd.kernels.machine import physical_cores

logger = logging.getLogger(__name__)


def load_ops(
    activations: Literal["auto", "fp32"] = "auto",
    threads: int = 0,
    variant: Variant = "native",
    cache: Path | None = None,
) -> CpuOps | None:
    """The ops of this CPU, compiled on the first call; None, after one line in the log, where that fails.

    activations "fp32": inputs are never rounded to INT8. threads: 0 for one a physical core.
    variant: "native" is the best path of this CPU, the others are for tests. cache: folder of the
    compiled library, by default the user's cache folder.
    """
    try:
        lib = Library(build(variant, cache), threads or physical_cores())
    except (BuildError, OSError) as error:
        logger.warning("no cpu kernels, so plain torch serves, many times slower: %s", error)
        return None
    return CpuOps(lib, int8_activations=activations == "auto")
