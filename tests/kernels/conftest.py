"""What the tests of kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def gpu_device() -> str:
    """Where the Triton kernels run: a GPU where there is one, else the interpreter on CPU tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"
