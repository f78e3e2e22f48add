"""The op table on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import ReferenceType, ref

import torch
import triton
from torch import Tensor

from quantd.kernels.gpu import activation as gates
from quantd.kernels.gpu import norm
from quantd.kernels.gpu.attention import attention
from quantd.kernels.gpu.dequantize import embedding
from quantd.kernels.gpu.linear import linear, linear_rounded, logits
from quantd.kernels.gpu.norm import Rounded
from quantd.kernels.gpu.rope import rope_kv_write
from quantd.kernels.gpu.tuning import Gpu, Tuning, gpu_of
from quantd.kernels.gpu.weights import GpuWeight, pack
from quantd.kernels.ops import Activation, AttentionInputs, HeadShape, KVLayer, QKNorm, RopeTable
from quantd.kernels.reference import Activations
from quantd.kernels.shortlist import Cut, Masks, Row, Shortlist, shortlists
from quantd.kernels.weights import QuantizedWeight, Weight

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class GpuOps:
    """The `Ops` of a GPU, or of a CPU where Triton interprets.

    dtype: of activations but the residual stream, which is float32: fp16 or bf16 (and float32 for tests).
    same_bits: a row's bits never depend on how many rows are beside it. activations "fp32": inputs are
    never rounded to INT8. tuning: None for the shipped plans.
    """

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        same_bits: bool = False,
        activations: Activations = "auto",
        tuning: Tuning | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._same_bits = same_bits
        self._rounds_inputs = activations == "auto"
        self._tuning = tuning or Tuning(gpu_of(self.device))
        # Once a weight wants its inputs in INT8, norms give them, for the linear that takes them next.
        self._norms_round = False
        self._last_rounded: tuple[ReferenceType[Tensor], Rounded] | None = None

    @property
    def name(self) -> str:
        """Such as "gpu sm_90 fp16"."""
        return f"gpu sm_{self._tuning.gpu.capability} {_NAMES[self.dtype]}"

    @property
    def build(self) -> str:
        """See Ops."""
        how = f"{'int8' if self._rounds_inputs else 'float'} {'same bits' if self._same_bits else 'fast'}"
        return f"{how} {self.gpu.name} triton {triton.__version__} {self._tuning.splits}"

    @property
    def gpu(self) -> Gpu:
        """What launches depend on."""
        return self._tuning.gpu

    def pack(self, weight: Weight, bias: Tensor | None = None) -> GpuWeight:
        """Bring a weight, and its bias [N], to the GPU."""
        if isinstance(weight, QuantizedWeight) and not self._rounds_inputs:
            weight = replace(weight, input_bits=None)
        packed = pack(weight, bias, self.device, self.dtype, int8_dots=self._tuning.gpu.has_dots)
        self._norms_round |= packed.rounds_inputs
        return packed

    def linear(self, x: Tensor, packed: GpuWeight) -> Tensor:
        """x [M, K] @ W.T + bias -> [M, N], both in compute dtype."""
        rounded = self._rounded(x) if packed.rounds_inputs else None
        if rounded is None:
            return linear(x, packed, self._tuning, self._same_bits)
        return linear_rounded(rounded, packed, self.dtype, self._tuning, self._same_bits)

    def embedding(self, token_ids: Tensor, packed: GpuWeight, scale: float = 1.0) -> Tensor:
        """Rows `token_ids` [M] of W, times scale -> float32 [M, K]."""
        return embedding(token_ids, packed, scale)

    def logits(self, x: Tensor, packed: GpuWeight, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """linear(x) * scale, softcapped -> float32 [M, N]."""
        return logits(x, packed, self._tuning, scale, softcap, self._same_bits)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight, over the last axis -> compute dtype."""
        if not self._norms_round:
            return norm.rms_norm(x, weight, eps, self.dtype)
        normed, rounded = norm.rms_norm_rounded(x, weight, eps, self.dtype)
        self._last_rounded = ref(normed), rounded
        return normed

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(s) in compute dtype, s in float32) with s = residual + scale * x."""
        if not self._norms_round:
            return norm.add_rms_norm(x, residual, weight, eps, scale, self.dtype)
        normed, total, rounded = norm.add_rms_norm_rounded(x, residual, weight, eps, scale, self.dtype)
        self._last_rounded = ref(normed), rounded
        return normed, total

    def _rounded(self, x: Tensor) -> Rounded | None:
        """x in INT8 if the last norm gave x."""
        if self._last_rounded is None or self._last_rounded[0]() is not x:
            return None
        return self._last_rounded[1]

    def rope_kv_write(
        self,
        qkv: Tensor,
        heads: HeadShape,
        inputs: AttentionInputs,
        layer: KVLayer,
        rope: RopeTable | None,
        qk_norm: QKNorm | None = None,
    ) -> Tensor:
        """Rotated queries [M, num_heads * D]; writes keys and values into `layer`."""
        return rope_kv_write(qkv, heads, inputs, layer, rope, qk_norm)

    def attention(
        self,
        q: Tensor,
        heads: HeadShape,
        inputs: AttentionInputs,
        layer: KVLayer,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal attention of q [M, num_heads * D] over the pool -> [M, num_heads * D]."""
        return attention(q, heads, inputs, layer, scale, window, softcap)

    def glu(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(left half) * right half of gate_up [M, 2 I] -> [M, I]."""
        return gates.glu(gate_up, activation)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """[M, N_i] each -> [M, sum of N_i]."""
        return torch.cat(tuple(parts), 1)

    def shortlists(self, rows: Sequence[Row], cuts: Sequence[Cut], masks: Masks = ()) -> list[Shortlist]:
        """For logits that have left the GPU; quantd.kernels.gpu.sampling draws from those that have not."""
        return shortlists(rows, cuts, masks)

    def compile(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """As it is: steps are recorded by their size, which is the runner's affair."""
        return forward
