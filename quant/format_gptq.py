"""GPTQ modules of AutoGPTQ and GPTQModel: qweight, qzeros, scales and perhaps g_idx.

W[k, n] = scales[g_idx[k], n] * (q[k, n] - z[g_idx[k], n]). qweight int32 [K * bits / 32, N] is a bit stream
along K, qzeros int32 [G, N * bits / 32] one along N, scales [G, N] (AutoGPTQ nn_modules/qlinear,
GPTQModel nn_modules/qlinear).
"""

from __future__ import annotations

import logging

from torch import Tensor

from quantd.kernels.weights import Weight
from quantd.quant import stand_in
from quantd.quant.config_gptq import GPTQConfig, GPTQSettings
from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.packing import affine, decode_zeros, group, stream_words, uniform_zero, unpack_stream
from quantd.quant.tensor_files import FLOATS, INTEGERS, TensorFiles

log = logging.getLogger(__name__)


class GPTQFormat:
    """See quantd.quant.checkpoint.LinearFormat."""

    def __init__(self, files: TensorFiles, config: GPTQConfig) -> None:
        self.files = files
        self.config = config
        self._warned: set[str] = set()

    def holds(self, module: str) -> bool:
        return self.files.has(f"{module}.qweight")

    def check(self, module: str, shape: tuple[int, int]) -> None:
        n, k = shape
        settings = self.config.settings(module)
        bits, groups = settings.bits, _num_groups(settings, k)
        for what, count in (("outputs", n), ("inputs", k)):
            if count * bits % 32:
                raise UnsupportedModelError(
                    f"{module}: {count} {what} of {bits} bits do not fill 32-bit words"
                )
        self.files.check(f"{module}.qweight", ("I32",), (stream_words(k, bits), n))
        self.files.check(f"{module}.qzeros", ("I32",), (groups, stream_words(n, bits)))
        self.files.check(f"{module}.scales", FLOATS, (groups, n))
        if self.files.has(f"{module}.g_idx"):
            self.files.check(f"{module}.g_idx", INTEGERS, (k,))
        elif settings.desc_act and not self.config.static_groups and groups > 1:
            raise CheckpointError(
                f"tensor {module}.g_idx is missing: with desc_act the group of each input is data that "
                "cannot be guessed; download the model again or quantize it anew"
            )

    def load(self, module: str, shape: tuple[int, int]) -> Weight:
        n, k = shape
        settings = self.config.settings(module)
        bits, groups = settings.bits, _num_groups(settings, k)
        qweight = self.files.read(f"{module}.qweight")
        codes = unpack_stream(qweight.t(), bits, k)
        stored = unpack_stream(self.files.read(f"{module}.qzeros"), bits, n)
        zeros = decode_zeros(stored, bits, self._zero_version(stored, settings))
        scale_offset = affine(self.files.read(f"{module}.scales").t(), zeros.t())
        size = settings.group_size if groups > 1 else k
        return group(codes, scale_offset, bits, size, self._group_index(module, settings, groups))

    def stand_in(self, module: str, shape: tuple[int, int]) -> Weight:
        settings = self.config.settings(module)
        groups = _num_groups(settings, shape[1])
        acts = settings.desc_act and not self.config.static_groups and self.files.has(f"{module}.g_idx")
        return stand_in.quantized(
            shape,
            settings.bits,
            settings.group_size if groups > 1 else None,
            stand_in.DTYPES[self.files.index[f"{module}.scales"].dtype],
            settings.sym,
            ordered=acts and groups > 1,
        )

    def _zero_version(self, stored: Tensor, settings: GPTQSettings) -> int:
        """The convention of the zero points: the data's where a symmetric file shows it, else the label's."""
        label = self.config.zero_version
        shown = uniform_zero(stored, settings.bits) if settings.sym else None
        if shown is None or shown == label:
            return label
        self._warn_once(f"zero points are labelled v{label} but stored as v{shown}; reading them as v{shown}")
        return shown

    def _group_index(self, module: str, settings: GPTQSettings, groups: int) -> Tensor | None:
        name = f"{module}.g_idx"
        if groups == 1 or not self.files.has(name):
            return None
        g_idx = self.files.read_groups(name, groups)
        if bool(g_idx.any()):
            return g_idx
        if settings.desc_act and not self.config.static_groups:
            raise CheckpointError(f"tensor {name}: all inputs in group 0 of {groups}: it was never filled in")
        self._warn_once("g_idx is all zero; without act-order groups are runs of consecutive inputs")
        return None

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)


def _num_groups(settings: GPTQSettings, k: int) -> int:
    return 1 if settings.group_size == -1 else -(-k // settings.group_size)
