"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def gpu_device() -> Iterator[str]:
    """Where the Triton kernels run: on the GPU with --gpu, else in the interpreter on CPU tensors."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    from bench.gpu_sides.interpreter import as_on_a_gpu  # imports triton

    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch.setattr)
        yield "cpu"


@pytest.fixture(autouse=True)
def quiet_infinities() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of an Inf or NaN where a GPU goes on."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, or 99, so that what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan if out.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", poisoned)
