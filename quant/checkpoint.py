"""A model folder as lazily read weights, whatever wrote it. Knows nothing of architectures or layers.

A module is named as in the checkpoint (`model.layers.0.mlp.up_proj`); its pieces (`.weight`, `.qweight`,
`.scales`, ...) are this package's business, its `.bias` is an ordinary tensor.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantd.kernels.weights import Weight
from quantd.quant.config import BitsAndBytesConfig, QuantConfig, read_quant_config
from quantd.quant.config_compressed_tensors import CompressedTensorsConfig
from quantd.quant.config_gptq import AWQConfig, GPTQConfig
from quantd.quant.errors import CheckpointError
from quantd.quant.format_awq import AWQFormat
from quantd.quant.format_bitsandbytes import BitsAndBytesFormat
from quantd.quant.format_compressed_tensors import CompressedTensorsFormat
from quantd.quant.format_dense import DenseFormat
from quantd.quant.format_gptq import GPTQFormat
from quantd.quant.safetensors_file import read_index, read_json
from quantd.quant.tensor_files import FLOATS, TensorFiles


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

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        """As `linear`, but with made-up values, and as many outputs as `shape` says.

        Reads no weight bytes; packed, it takes what a real one of that shape takes.
        """

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A plain tensor (norm, bias, table) as float32 of `shape`."""


class LinearFormat(Protocol):
    """One way to store the weights of a linear module in safetensors; a sibling file each.

    Same errors as Checkpoint. `load` is only called after `check` has passed with the same arguments.
    """

    def holds(self, module: str) -> bool:
        """Whether the tensors present are this format's."""

    def check(self, module: str, shape: tuple[int, int]) -> None:
        """Raise unless every piece is there with the right dtype and shape."""

    def load(self, module: str, shape: tuple[int, int]) -> Weight:
        """Read and decode."""

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        """See Checkpoint."""


class SafetensorsCheckpoint:
    """A Hugging Face model folder; see Checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        quantization = read_quant_config(path, self.config)
        self._files = TensorFiles(read_index(path))
        quantized = [] if quantization is None else [_quantized_format(self._files, quantization)]
        self._formats: list[LinearFormat] = [*quantized, DenseFormat(self._files)]
        self.description = quantization.description if quantization else self._main_dtype()

    def _main_dtype(self) -> str:
        sizes: Counter[str] = Counter()
        for info in self._files.index.values():
            sizes[info.dtype] += info.nbytes
        main = max(sizes, key=sizes.__getitem__, default="empty")
        return {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}.get(main, main)

    @property
    def weight_bytes(self) -> int:
        return sum(info.nbytes for info in self._files.index.values())

    def names(self) -> list[str]:
        return list(self._files.index)

    def has(self, name: str) -> bool:
        return self._files.has(name)

    def has_module(self, module: str) -> bool:
        return any(self.has(f"{module}.{piece}") for piece in ("weight", "qweight", "weight_packed"))

    def check_linear(self, module: str, shape: tuple[int, int]) -> None:
        self._format(module).check(module, shape)

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        self._files.check(name, FLOATS, shape)

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        self.check_linear(module, shape)
        return self._format(module).load(module, shape)

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        return self._format(module).stand_in(module, shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.check_tensor(name, shape)
        return self._files.read(name).to(torch.float32)

    def _format(self, module: str) -> LinearFormat:
        for form in self._formats:
            if form.holds(module):
                return form
        if self.has_module(module):
            raise CheckpointError(
                f"{module} has quantized tensors but {self.path} says nothing of its quantization: "
                "quantize_config.json or config.json's quantization_config is missing"
            )
        raise CheckpointError(f"tensor {module}.weight is missing from {self.path}")


def _quantized_format(files: TensorFiles, config: QuantConfig) -> LinearFormat:
    match config:
        case GPTQConfig():
            return GPTQFormat(files, config)
        case AWQConfig():
            return AWQFormat(files, config)
        case CompressedTensorsConfig():
            return CompressedTensorsFormat(files, config)
        case BitsAndBytesConfig():
            return BitsAndBytesFormat(files)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`: its single GGUF file, else its safetensors.

    Reads indices and configuration only. Raises CheckpointError for what is damaged or missing and
    UnsupportedModelError for formats that quantd does not have.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        from quantd.quant.gguf import open_gguf  # GGUF support imports `gguf`, which others need not pay for

        return open_gguf(path)
    if len(ggufs) > 1 and not any(path.glob("*.safetensors")):
        names = ", ".join(file.name for file in ggufs[:4])
        raise CheckpointError(f"{path}: {len(ggufs)} GGUF files ({names}): leave the one to load")
    return SafetensorsCheckpoint(path)
