"""AWQ modules in AutoAWQ's "gemm" packing: like GPTQ, but packed along the outputs, with true zero points.

W[k, n] = scales[g, n] * (q[k, n] - z[g, n]). qweight int32 [K, N / 8], qzeros int32 [G, N / 8],
scales [G, N]; the eight nibbles of a word are interleaved (AutoAWQ
awq/utils/packing_utils.py, awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from quantd.kernels.weights import Weight
from quantd.quant import stand_in
from quantd.quant.config_gptq import AWQConfig
from quantd.quant.errors import UnsupportedModelError
from quantd.quant.packing import AWQ_ORDER, affine, group, split_fields
from quantd.quant.tensor_files import FLOATS, TensorFiles


class AWQFormat:
    """See quantd.quant.checkpoint.LinearFormat."""

    def __init__(self, files: TensorFiles, config: AWQConfig) -> None:
        self.files = files
        self.config = config

    def holds(self, module: str) -> bool:
        return self.files.has(f"{module}.qweight")

    def check(self, module: str, shape: tuple[int, int]) -> None:
        n, k = shape
        groups = -(-k // self._group_size(k))
        if n % 8:
            raise UnsupportedModelError(f"{module}: {n} outputs do not fill the 8-nibble words of AWQ")
        self.files.check(f"{module}.qweight", ("I32",), (k, n // 8))
        self.files.check(f"{module}.qzeros", ("I32",), (groups, n // 8))
        self.files.check(f"{module}.scales", FLOATS, (groups, n))

    def load(self, module: str, shape: tuple[int, int]) -> Weight:
        bits = self.config.bits
        codes = split_fields(self.files.read(f"{module}.qweight"), bits, AWQ_ORDER)
        zeros = split_fields(self.files.read(f"{module}.qzeros"), bits, AWQ_ORDER)
        scale_offset = affine(self.files.read(f"{module}.scales").t(), zeros.t())
        return group(codes.t().contiguous(), scale_offset, bits, self._group_size(shape[1]))

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        dtype = stand_in.DTYPES[self.files.index[f"{module}.scales"].dtype]
        return stand_in.quantized(shape, self.config.bits, self._group_size(shape[1]), dtype, symmetric=False)

    def _group_size(self, k: int) -> int:
        return k if self.config.group_size == -1 else self.config.group_size
