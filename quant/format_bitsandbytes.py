"""bitsandbytes INT8 modules: `weight` int8 [N, K] and `SCB` float32 [N], the absolute maximum of each row.

W = weight * SCB / 127 (bitsandbytes nn/modules.py, autograd/_functions.py). Inputs stay unrounded, so the
outlier decomposition of LLM.int8() has nothing to do.
"""

from __future__ import annotations

import torch

from quantd.kernels.weights import Weight
from quantd.quant import stand_in
from quantd.quant.errors import UnsupportedModelError
from quantd.quant.packing import affine, group
from quantd.quant.tensor_files import TensorFiles


class BitsAndBytesFormat:
    """See quantd.quant.checkpoint.LinearFormat."""

    def __init__(self, files: TensorFiles) -> None:
        self.files = files

    def holds(self, module: str) -> bool:
        return self.files.has(f"{module}.SCB") or self.files.dtype(f"{module}.weight") == "I8"

    def check(self, module: str, shape: tuple[int, int]) -> None:
        self.files.check(f"{module}.weight", ("I8",), shape)
        self.files.check(f"{module}.SCB", ("F32",), shape[:1])
        if self.files.has(f"{module}.weight_format"):
            self.files.check(f"{module}.weight_format", ("U8",), (), (1,))

    def load(self, module: str, shape: tuple[int, int]) -> Weight:
        layout = f"{module}.weight_format"
        if self.files.has(layout) and int(self.files.read(layout)) != 0:
            raise UnsupportedModelError(f"tensor {layout}: only row-major weights (0) are supported")
        codes = (self.files.read(f"{module}.weight").view(torch.uint8)) ^ 128
        scale = self.files.read(f"{module}.SCB")[:, None] / 127
        return group(codes, affine(scale, 128), 8, shape[1])

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        return stand_in.quantized(shape, 8, None, torch.float32, symmetric=True)
