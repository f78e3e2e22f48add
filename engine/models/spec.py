"""What a decoder is made of, as numbers and names: all that its forward and its loading need.

One family covers every architecture: pre-norm blocks of grouped-query attention and a gated MLP.
What an architecture lacks is None, 0 or 1 here, so that the decoder needs no names of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantd.engine.layers.rope import RopeSpec
from quantd.kernels.ops import Activation, HeadShape


@dataclass(frozen=True)
class LayerSpec:
    """rope: index into DecoderSpec.ropes, None for a layer without positions. window: 0 for none."""

    rope: int | None = 0
    window: int = 0


@dataclass(frozen=True)
class LayerNames:
    """Where a layer's tensors lie in a checkpoint, below the layer's own prefix.

    qkv and gate_up: one module each output, or a single one where the checkpoint stores them fused.
    biases: modules that must have a bias; one that is there without being listed is used as well.
    """

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str | None = None
    k_norm: str | None = None
    o: str = "self_attn.o_proj"
    after_attention_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    after_mlp_norm: str | None = None
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinearSpec:
    """A matrix of the decoder: checkpoint modules, whose outputs are joined, over the same inputs."""

    modules: tuple[str, ...]
    num_outputs: tuple[int, ...]
    num_inputs: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Each module with its (outputs N, inputs K)."""
        for module, n in zip(self.modules, self.num_outputs, strict=True):
            yield module, (n, self.num_inputs)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder. Lengths in tokens.

    max_model_len: the served length, for which rope tables are made. norm_offset: added to every norm
    weight. logits_scale multiplies, softcaps of 0 are off. tied: the output matrix is the embedding
    unless the checkpoint has one of its own.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: HeadShape
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_model_len: int
    norm_eps: float
    attention_scale: float
    tied: bool
    names: LayerNames = LayerNames()
    activation: Activation = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0

    def qkv(self, layer: str) -> LinearSpec:
        """Queries, keys and values of the layer with prefix `layer`."""
        q, kv = self.heads.num_heads, self.heads.num_kv_heads
        sizes = tuple(n * self.heads.head_dim for n in (q, kv, kv))
        return _joined(layer, self.names.qkv, sizes, self.hidden_size)

    def o(self, layer: str) -> LinearSpec:
        """The projection behind attention."""
        inputs = self.heads.num_heads * self.heads.head_dim
        return _joined(layer, (self.names.o,), (self.hidden_size,), inputs)

    def gate_up(self, layer: str) -> LinearSpec:
        """The two halves that the MLP's gated activation takes."""
        sizes = (self.intermediate_size, self.intermediate_size)
        return _joined(layer, self.names.gate_up, sizes, self.hidden_size)

    def down(self, layer: str) -> LinearSpec:
        """The projection behind the MLP's activation."""
        return _joined(layer, (self.names.down,), (self.hidden_size,), self.intermediate_size)

    def linears(self, layer: str) -> tuple[LinearSpec, ...]:
        """All matrices of a layer."""
        return self.qkv(layer), self.o(layer), self.gate_up(layer), self.down(layer)

    def norms(self, layer: str) -> Iterator[tuple[str, int]]:
        """A layer's norms, each with the size of its weight."""
        names, head_dim = self.names, self.heads.head_dim
        full = (names.attention_norm, names.after_attention_norm, names.mlp_norm, names.after_mlp_norm)
        for size, norms in ((self.hidden_size, full), (head_dim, (names.q_norm, names.k_norm))):
            for norm in norms:
                if norm is not None:
                    yield f"{layer}.{norm}", size


def _joined(layer: str, modules: tuple[str, ...], sizes: tuple[int, ...], num_inputs: int) -> LinearSpec:
    if len(modules) == 1:
        sizes = (sum(sizes),)
    return LinearSpec(tuple(f"{layer}.{module}" for module in modules), sizes, num_inputs)
