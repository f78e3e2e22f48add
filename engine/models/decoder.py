"""The one decoder: token ids to hidden states to logits, for every architecture a DecoderSpec can tell.

All arithmetic is calls of `ops` in an order that no value decides, so a backend can record a forward
and replay it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quantd.engine.errors import NumericsError
from quantd.engine.models.spec import DecoderSpec, LayerSpec
from quantd.engine.weights import DecoderWeights, LayerWeights, Linear
from quantd.kernels.ops import AttentionInputs, KVLayer, Ops


class Decoder:
    """A loaded model on one backend."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, ops: Ops) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops
        following = [layer.attention_norm for layer in weights.layers[1:]]
        # The norm before a layer is computed together with the sum behind the one above it.
        self._next_norms = (*following, weights.final_norm)

    def forward(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        """Hidden states behind the final norm, float32 [M, H], of token_ids int32 [M].

        Writes the tokens' keys and values into `kv`, one KVLayer a layer.
        """
        ((_, hidden),) = deque(self._stages(token_ids, inputs, kv), maxlen=1)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden states [R, H] behind the final norm."""
        return self.ops.logits(hidden, self.weights.head, self.spec.logits_scale, self.spec.logits_softcap)

    def check_finite(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> None:
        """Run one forward and its logits; raise NumericsError naming the first part that gives NaN or Inf."""
        hidden = token_ids
        for name, hidden in self._stages(token_ids, inputs, kv):
            _require_finite(name, hidden)
        _require_finite("the output matrix", self.logits(hidden))

    def _stages(
        self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]
    ) -> Iterator[tuple[str, Tensor]]:
        """A forward part by part, each with a name for people; the last is the final norm."""
        ops, spec, weights = self.ops, self.spec, self.weights
        x = ops.embedding(token_ids, weights.embedding, spec.embedding_scale)
        yield "the embedding", x
        normed = ops.rms_norm(x, weights.layers[0].attention_norm, spec.norm_eps)
        parts = zip(spec.layers, weights.layers, self._next_norms, kv, strict=True)
        for i, (layer, layer_weights, next_norm, layer_kv) in enumerate(parts):
            mixed = self._attention(normed, layer, layer_weights, inputs, layer_kv)
            normed, x = self._add_norm(mixed, x, layer_weights.mlp_norm)
            normed, x = self._add_norm(self._mlp(normed, layer_weights), x, next_norm)
            yield f"layer {i}", x
        yield "the final norm", normed

    def _attention(
        self, x: Tensor, layer: LayerSpec, weights: LayerWeights, inputs: AttentionInputs, kv: KVLayer
    ) -> Tensor:
        ops, spec = self.ops, self.spec
        rope = None if layer.rope is None else self.weights.ropes[layer.rope]
        qkv = self._linear(x, weights.qkv)
        q = ops.rope_kv_write(qkv, spec.heads, inputs, kv, rope, weights.qk_norm)
        mixed = ops.attention(
            q, spec.heads, inputs, kv, spec.attention_scale, layer.window, spec.attention_softcap
        )
        return self._norm(self._linear(mixed, weights.o), weights.after_attention_norm)

    def _mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        gated = self.ops.glu(self._linear(x, weights.gate_up), self.spec.activation)
        return self._norm(self._linear(gated, weights.down), weights.after_mlp_norm)

    def _linear(self, x: Tensor, pieces: Linear) -> Tensor:
        outputs = [self.ops.linear(x, piece) for piece in pieces]
        return outputs[0] if len(outputs) == 1 else self.ops.concat(outputs)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.ops.rms_norm(x, weight, self.spec.norm_eps)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        return self.ops.add_rms_norm(x, residual, weight, spec.norm_eps, spec.residual_scale)


def _require_finite(name: str, values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise NumericsError(f"{name} gives NaN or Inf: the checkpoint is damaged or badly quantized there")
