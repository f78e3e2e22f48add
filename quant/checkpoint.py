"""A model folder as lazily read weights, whatever wrote it. Knows nothing of architectures or layers.

A module is named as in the checkpoint (`model.layers.0.mlp.up_proj`); its pieces (`.weight`, `.qweight`,
`.scales`, ...) are this package's business, its `.bias` is an ordinary tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from quantd.kernels.weights import Weight


class Checkpoint(Protocol):
    """What every weight format offers to a model that is being built.

    `check_*` look at the index alone and read no weight bytes, so a whole model is validated before any
    memory is taken. All methods raise CheckpointError where the files are damaged, incomplete or of the
    wrong shape and UnsupportedModelError where they ask for what quantd does not have; the message names
    the tensor, what was expected and what was found.
    """

    @property
    def path(self) -> Path:
        """The model folder."""

    @property
    def config(self) -> dict[str, Any]:
        """The Hugging Face config.json, or what a GGUF's metadata makes of one."""

    @property
    def description(self) -> str:
        """For people: "gptq 4-bit g32 act-order"."""

    @property
    def weight_bytes(self) -> int:
        """Bytes on disk of all tensors that the index names."""

    def names(self) -> list[str]:
        """All tensor names, in file order."""

    def has(self, name: str) -> bool:
        """Whether the tensor `name` exists."""

    def has_module(self, module: str) -> bool:
        """Whether a weight of `module` exists, in any format."""

    def check_linear(self, module: str, shape: tuple[int, int]) -> None:
        """Raise unless `linear` with the same arguments can succeed, as far as the index tells."""

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless `tensor` with the same arguments can succeed, as far as the index tells."""

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """The weight of `module`; shape is (outputs N, inputs K)."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A plain tensor (norm, bias, table) as float32 of `shape`."""
