"""Which backend computes: the fastest that this machine can run, or the one asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

import quantd.kernels.gpu  # noqa: F401  (settles what triton reads when it is imported)
from quantd.kernels.errors import QuantdError
from quantd.kernels.gpu.targets import TARGETS
from quantd.kernels.ops import Ops
from quantd.kernels.reference import Activations, ReferenceOps

Backend = Literal["auto", "reference", "cpu", "gpu"]
_CPU = torch.device("cpu")

logger = logging.getLogger(__name__)


def choose_backend(asked: Backend) -> Backend:
    """ "gpu" in place of "auto" where there is a GPU that the kernels run on; else what was asked for.

    A line in the log says why. Raises QuantdError where "gpu" was asked for and cannot be had; for that
    Triton's interpreter will do, on the CPU.
    """
    if asked not in ("auto", "gpu"):
        return asked
    missing = _missing_gpu()
    if missing is None:
        logger.info("computing on %s", torch.cuda.get_device_name(0))
        return "gpu"
    if asked == "auto":
        logger.info("computing on the CPU: %s", missing)
        return "auto"
    if not _is_interpreted():
        raise QuantdError(
            f"the gpu backend cannot run here: {missing}; see quantd doctor, or use backend auto"
        )
    return "gpu"


def select_ops(
    backend: Backend = "auto",
    activations: Activations = "auto",
    threads: int = 0,
    cache: Path | None = None,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float16,
    same_bits: bool = True,
) -> Ops:
    """The ops of a backend. cache: the folder of what is compiled or measured on this machine, None for the
    user's cache folder.

    threads: of the CPU backend, 0 for one a physical core. device, dtype, same_bits: of the GPU backend (see
    GpuOps). "auto" takes the CPU backend (see choose_backend) and falls back to the reference; a line in the
    log says why. Raises QuantdError where "cpu" was asked for and cannot be built.
    """
    if backend == "reference":
        return ReferenceOps(activations)
    if backend == "gpu":
        return _gpu_ops(device, dtype, same_bits, activations, cache)
    from quantd.kernels.cpu import load_ops  # compiles C on the first call

    ops: Ops | None = load_ops(activations, threads, cache=cache)
    if ops is not None:
        return ops
    if backend == "cpu":
        raise QuantdError("the cpu backend cannot be built here: install a C compiler, or use backend auto")
    return ReferenceOps(activations)


def _gpu_ops(
    device: torch.device, dtype: torch.dtype, same_bits: bool, activations: Activations, cache: Path | None
) -> Ops:
    from quantd.kernels.gpu.ops import GpuOps  # needs triton
    from quantd.kernels.gpu.tuning import gpu_of, load_tuning

    tuning = None if cache is None else load_tuning(cache, gpu_of(device))
    return GpuOps(device, dtype, same_bits, activations, tuning)


def _missing_gpu() -> str | None:
    """What is missing for the gpu backend."""
    if torch.version.cuda is None:
        return "this build of torch is not for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        import quantd.kernels.gpu.linear  # noqa: F401  (imports triton, which may be there and broken)
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return too_old(0)


def too_old(index: int) -> str | None:
    """Why the kernels do not run on a GPU, by its number; None where they do."""
    major, minor = torch.cuda.get_device_capability(index)
    if 10 * major + minor >= TARGETS[0]:
        return None
    return f"{torch.cuda.get_device_name(index)} is of compute capability {major}.{minor}, 7.5 is the least"


def _is_interpreted() -> bool:
    """Whether Triton runs kernels as Python, on tensors of the CPU."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)
