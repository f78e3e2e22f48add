"""What errors mean that name no kind of their own. Messages as torch, Triton, NCCL and Linux spell them."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from quantd.engine.errors import CapacityError, RankError, StepMemoryError
from quantd.engine.faults import is_gpu_fault, is_out_of_memory, kind_of

CALLOC = "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB."), "OutOfMemoryError"),
        (
            torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAlloc"),
            "OutOfMemoryError",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "OutOfMemoryError"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate"),
            "OutOfMemoryError",
        ),
        (RuntimeError(CALLOC), "OutOfMemoryError"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
            "MemoryError",
        ),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "MemoryError"),
        (MemoryError(), "MemoryError"),
        (StepMemoryError("a rank has not the 8 bytes that a step takes"), "StepMemoryError"),
    ],
)
def test_want_of_memory_is_known_by_whatever_name(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind
    assert is_out_of_memory(error)
    assert not is_gpu_fault(error)


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("out of resource: shared memory, Required: 114688, Hardware limit: 101376"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ZeroDivisionError("division by zero"), False),
        (RankError("rank 1: CUDA out of memory"), False),
        (CapacityError("no 8 bytes for the KV cache: CUDA out of memory"), False),
    ],
)
def test_nothing_else_is_taken_for_it(error: Exception, is_fault: bool) -> None:
    assert kind_of(error) == type(error).__name__
    assert not is_out_of_memory(error)
    assert is_gpu_fault(error) == is_fault
