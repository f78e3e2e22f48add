"""Plain floating-point weights: `weight` [N, K]."""

from __future__ import annotations

from quantd.kernels.weights import DenseWeight, Weight
from quantd.quant import stand_in
from quantd.quant.tensor_files import FLOATS, TensorFiles


class DenseFormat:
    """Modules that are not quantized; see quantd.quant.checkpoint.LinearFormat."""

    def __init__(self, files: TensorFiles) -> None:
        self.files = files

    def holds(self, module: str) -> bool:
        return self.files.has(f"{module}.weight")

    def check(self, module: str, shape: tuple[int, int]) -> None:
        self.files.check(f"{module}.weight", FLOATS, shape)

    def load(self, module: str, shape: tuple[int, int]) -> Weight:
        return DenseWeight(self.files.read(f"{module}.weight"))

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        return stand_in.dense(shape, stand_in.DTYPES[self.files.index[f"{module}.weight"].dtype])
