"""The contract of a backend: every op of a forward pass, one signature for all implementations.

Shapes: M tokens of a step (all requests' new tokens, concatenated), R requests, H hidden size,
N x K weights, D head size. Activations are float32 on a CPU. All index tensors are int32.
Ops never write to their inputs unless the docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from quantd.kernels.shortlist import Cut, Masks, Row, Shortlist
from quantd.kernels.weights import Weight

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class KVLayer:
    """One layer's part of the block pool, as strided views.

    k, v: [num_blocks, kv_heads, block_size, D], int8 codes or floats.
    k_scale, v_scale: float32 [num_blocks, kv_heads, block_size] with int8 codes, else None;
    value = code * scale, symmetric, scale = absmax / 127 of that token's head vector.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class AttentionInputs:
    """Where the tokens of a step stand. Request r owns tokens query_start[r] : query_start[r + 1].

    positions: [M], a token's index in its request. slots: [M], its place in the pool
    (block id * block_size + offset). query_start: [R + 1]. context_len: [R], tokens of the request
    in the pool once this step has written its own. block_tables: [R, max_blocks], unused entries 0.
    """

    positions: Tensor
    slots: Tensor
    query_start: Tensor
    context_len: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class RopeTable:
    """cos, sin: float32 [max_positions, rotary_dim / 2], any attention factor multiplied in.

    Rotates the first rotary_dim elements of a head, element i paired with i + rotary_dim / 2
    (the Hugging Face half-split convention); the rest of the head passes through.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class HeadShape:
    """num_heads query heads and num_kv_heads key/value heads of head_dim elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm of each query and key head before rotation; weights float32 [D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class PackedWeight(Protocol):
    """A weight as a backend keeps it. Opaque but for its size."""

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K)."""

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""


class Ops(Protocol):
    """A backend. `packed` arguments are what the same backend's `pack` returned."""

    @property
    def name(self) -> str:
        """What `quantd doctor` prints: "reference", "cpu avx2", ..."""

    @property
    def build(self) -> str:
        """What bits of results hang on beside inputs, torch and the name; for those that are kept."""

    def pack(self, weight: Weight, bias: Tensor | None = None) -> PackedWeight:
        """Bring a weight into this backend's layout. bias: [N], added by `linear`."""

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [M, K] @ W.T + bias -> [M, N]."""

    def embedding(self, token_ids: Tensor, packed: Any, scale: float = 1.0) -> Tensor:
        """Rows `token_ids` [M] of W, times scale -> float32 [M, K]."""

    def logits(self, x: Tensor, packed: Any, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """linear(x) * scale, then softcap * tanh(. / softcap) where softcap > 0 -> float32 [M, N]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight, over the last axis; weight float32 [H]."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(s), s) with s = residual + scale * x."""

    def rope_kv_write(
        self,
        qkv: Tensor,
        heads: HeadShape,
        inputs: AttentionInputs,
        layer: KVLayer,
        rope: RopeTable | None,
        qk_norm: QKNorm | None = None,
    ) -> Tensor:
        """qkv [M, (num_heads + 2 num_kv_heads) * D] -> rotated queries [M, num_heads * D].

        Norms queries and keys where asked, rotates both (rope None: not at all), and writes keys
        and values into `layer` at `inputs.slots`, quantized where the layer is.
        """

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
        """Causal attention of q [M, num_heads * D] over the pool -> [M, num_heads * D].

        Keys and values are read back from the pool, also those of this step. window > 0: a token
        sees itself and the window - 1 before it. softcap > 0: scores become softcap * tanh(s / softcap).
        """

    def glu(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(left half) * right half of gate_up [M, 2 I] -> [M, I]."""

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Outputs [M, N_i] side by side -> [M, sum of N_i]; for weights too unlike to be packed as one."""

    def shortlists(self, rows: Sequence[Row], cuts: Sequence[Cut], masks: Masks = ()) -> list[Shortlist]:
        """What tokens are drawn from, of rows of logits [V] in the CPU's memory; see kernels/shortlist.py."""

    def compile(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A backend's chance to record a forward built from these ops and replay it; may return it as is."""
