"""compressed-tensors modules with integer weights, packed into words or one a byte.

W[n, k] = weight_scale[n, g] * (q[n, k] - zero[n, g]) with signed q and zero. "pack-quantized" holds
`weight_packed` int32, codes + 2^(b-1) along K, and zero points likewise along N; "int-quantized" holds
`weight` int8 and int8 zero points. `weight_g_idx` [K] comes with activation ordering by group
(compressed-tensors compressors/pack_quantized, compressors/naive_quantized).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantd.kernels.weights import Weight
from quantd.quant import stand_in
from quantd.quant.config_compressed_tensors import CompressedScheme, CompressedTensorsConfig
from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.packing import DENSE, PADDED, Packing, affine, group
from quantd.quant.tensor_files import FLOATS, INTEGERS, TensorFiles


class CompressedTensorsFormat:
    """See quantd.quant.checkpoint.LinearFormat."""

    def __init__(self, files: TensorFiles, config: CompressedTensorsConfig) -> None:
        self.files = files
        self.config = config

    def holds(self, module: str) -> bool:
        return self.files.has(f"{module}.weight_packed") or self.files.dtype(f"{module}.weight") == "I8"

    def check(self, module: str, shape: tuple[int, int]) -> None:
        n, k = shape
        scheme = self._scheme(module)
        groups = _num_groups(scheme, k)
        if self.files.has(f"{module}.weight_packed"):
            widths = {packing.words(k, scheme.bits) for packing in (DENSE, PADDED)}
            self.files.check(f"{module}.weight_packed", ("I32",), *((n, width) for width in sorted(widths)))
            if len(widths) == 1 and 32 % scheme.bits:
                raise UnsupportedModelError(
                    f"{module}: {k} inputs of {scheme.bits} bits are too few to tell how they are packed"
                )
            if self.files.has(f"{module}.weight_shape"):
                self.files.check(f"{module}.weight_shape", INTEGERS, (2,))
        else:
            self.files.check(f"{module}.weight", ("I8",), shape)
        scales = ((1,), (1, 1), ()) if scheme.strategy == "tensor" else ((n, groups),)
        self.files.check(f"{module}.weight_scale", FLOATS, *scales)
        self._check_zeros(module, scheme, shape, groups)
        self._check_order(module, scheme, k, groups)

    def _check_zeros(
        self, module: str, scheme: CompressedScheme, shape: tuple[int, int], groups: int
    ) -> None:
        name = f"{module}.weight_zero_point"
        if not self.files.has(name) and scheme.symmetric:
            return
        n, k = shape
        if self.files.has(f"{module}.weight_packed") and self.files.dtype(name) == "I32":
            words = self._packing(module, k, scheme.bits).words(n, scheme.bits)
            self.files.check(name, ("I32",), (words, groups))
        else:
            whole = ((1,), (1, 1)) if scheme.strategy == "tensor" else ()
            self.files.check(name, ("I8",), (n, groups), *whole)

    def _check_order(self, module: str, scheme: CompressedScheme, k: int, groups: int) -> None:
        name = f"{module}.weight_g_idx"
        if self.files.has(name):
            self.files.check(name, INTEGERS, (k,))
        elif scheme.ordered and groups > 1:
            raise CheckpointError(f"tensor {name} is missing: expected [{k}], as actorder is group")

    def load(self, module: str, shape: tuple[int, int]) -> Weight:
        n, k = shape
        scheme = self._scheme(module)
        bits, groups = scheme.bits, _num_groups(scheme, k)
        scale = self.files.read(f"{module}.weight_scale").reshape(-1, groups).expand(n, groups)
        return group(
            self._codes(module, shape, bits),
            affine(scale, self._zeros(module, shape, groups, bits)),
            bits,
            scheme.group_size or k,
            self._group_index(module, groups),
            scheme.input_bits,
        )

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        scheme = self._scheme(module)
        return stand_in.quantized(
            shape,
            scheme.bits,
            scheme.group_size,
            stand_in.DTYPES[self.files.index[f"{module}.weight_scale"].dtype],
            symmetric=not self.files.has(f"{module}.weight_zero_point"),
            ordered=_num_groups(scheme, shape[1]) > 1 and self.files.has(f"{module}.weight_g_idx"),
            input_bits=scheme.input_bits,
        )

    def _scheme(self, module: str) -> CompressedScheme:
        scheme = self.config.scheme(module)
        if scheme is None:
            raise CheckpointError(
                f"{module} has quantized tensors but no config group of config.json names it"
            )
        return scheme

    def _codes(self, module: str, shape: tuple[int, int], bits: int) -> Tensor:
        """uint8 [N, K], offset by 2^(bits - 1)."""
        n, k = shape
        if not self.files.has(f"{module}.weight_packed"):
            return _offset_bytes(self.files.read(f"{module}.weight"), bits, f"{module}.weight")
        stated = f"{module}.weight_shape"
        if self.files.has(stated) and self.files.read(stated).tolist() != [n, k]:
            found = self.files.read(stated).tolist()
            raise CheckpointError(f"tensor {stated}: expected {[n, k]}, found {found}")
        packing = self._packing(module, k, bits)
        return packing.unpack(self.files.read(f"{module}.weight_packed"), bits, k)

    def _packing(self, module: str, k: int, bits: int) -> Packing:
        """Recent writers pack densely, older ones 32 // bits codes a word; the width of the weights tells."""
        width = self.files.index[f"{module}.weight_packed"].shape[1]
        return DENSE if width == DENSE.words(k, bits) else PADDED

    def _zeros(self, module: str, shape: tuple[int, int], groups: int, bits: int) -> Tensor | int:
        """Zero points [N, G] with the offset of `_codes`."""
        name = f"{module}.weight_zero_point"
        if not self.files.has(name):
            return 1 << (bits - 1)
        n, k = shape
        stored = self.files.read(name)
        if stored.dtype == torch.int32:
            return self._packing(module, k, bits).unpack(stored.t(), bits, n).t()
        return _offset_bytes(stored, bits, name).reshape(-1, groups).expand(n, groups)

    def _group_index(self, module: str, groups: int) -> Tensor | None:
        name = f"{module}.weight_g_idx"
        if groups == 1 or not self.files.has(name):
            return None
        return self.files.read_groups(name, groups)


def _num_groups(scheme: CompressedScheme, k: int) -> int:
    return -(-k // scheme.group_size) if scheme.group_size else 1


def _offset_bytes(values: Tensor, bits: int, name: str) -> Tensor:
    """int8 values of `bits` bits -> uint8, offset by 2^(bits - 1)."""
    half = 1 << (bits - 1)
    if bits < 8:
        low, high = (int(bound) for bound in torch.aminmax(values))
        if low < -half or high >= half:
            raise CheckpointError(f"tensor {name}: expected {-half} to {half - 1}, found {low} to {high}")
    return (values.to(torch.int16) + half).to(torch.uint8)
