"""What the errors of torch, CUDA and Triton mean, and how errors are told on (torch-free)."""

from __future__ import annotations

from quantd.engine.errors import StepMemoryError
from quantd.kernels.errors import QuantdError

# Torch has a class of its own for what its own allocator could not get of a GPU, and for nothing else.
_CPU_MEMORY = ("can't allocate memory", "Cannot allocate memory")
_GPU_MEMORY = ("out of memory", "ALLOC_FAILED", "Failed to CUDA calloc", "Failed to CUDA malloc")


def kind_of(error: Exception) -> str:
    """The error's class; where memory was wanting "MemoryError", or "OutOfMemoryError" of a GPU."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, QuantdError):
        return name
    if any(phrase in text for phrase in _CPU_MEMORY):
        return "MemoryError"
    return "OutOfMemoryError" if any(phrase in text for phrase in _GPU_MEMORY) else name


def describe(error: Exception) -> str:
    """An error in a line: our own speak for themselves."""
    return str(error) if isinstance(error, QuantdError) else f"{type(error).__name__}: {error}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was wanting, of the CPU or a GPU. What came after it can still be computed."""
    return kind_of(error) in ("MemoryError", "OutOfMemoryError", StepMemoryError.__name__)


def is_gpu_fault(error: Exception) -> bool:
    """Whether torch or Triton met a fault of a GPU, behind which every call of its context fails."""
    return kind_of(error) == "AcceleratorError" or (
        "Triton Error [CUDA]" in str(error) and not is_out_of_memory(error)
    )
