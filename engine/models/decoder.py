"""The one decoder: token ids to hidden states to logits, for every architecture a DecoderSpec can tell.

All arithmetic is calls of `ops` in an order that no value decides, so a backend can record a forward
and replay it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from quantd.engine.errors import NumericsError
from quantd.engine.models.spec import DecoderSpec, LayerSpec
from quantd.engine.parallel import ALONE, Group
from quantd.engine.shard import Gather, Part, head_shares, output_shares
from quantd.engine.weights import DecoderWeights, LayerWeights, Linear
from quantd.kernels.ops import AttentionInputs, KVLayer, Ops


class Decoder:
    """A loaded model on one backend, or the part of it that one rank holds.

    A stage that is not the first takes the residual stream of the one before in place of token ids, and
    one that is not all of the model gives it on.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        ops: Ops,
        part: Part | None = None,
        group: Group = ALONE,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self.part = part or Part(range(len(spec.layers)))
        self.heads = head_shares(spec.heads, self.part.size)[self.part.rank].shape(spec.heads.head_dim)
        self._group = group
        self._words = output_shares(spec.vocab_size, self.part.size)
        following = [layer.attention_norm for layer in weights.layers[1:]]
        # The norm before a layer is computed together with the sum behind the one above it.
        self._next_norms = (*following, weights.final_norm)

    @property
    def is_whole(self) -> bool:
        """Whether all layers are here."""
        return len(self.part.layers) == len(self.spec.layers)

    def forward(self, entering: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        """Hidden states behind the final norm, float32 [M, H], of token_ids int32 [M].

        Writes the tokens' keys and values into `kv`, one KVLayer a layer. Of a stage: from token ids or
        the residual stream to the residual stream, float32 [M, H].
        """
        ((_, leaving),) = deque(self.parts(entering, inputs, kv), maxlen=1)
        return leaving

    def final_norm(self, x: Tensor) -> Tensor:
        """Hidden states of the residual stream [M, H] that the last of several stages gave."""
        return self.ops.rms_norm(x, self.weights.final_norm, self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden states [R, H] behind the final norm; on rank 0 if there are several."""
        head, spec = self.weights.head, self.spec
        own = self.ops.logits(hidden, head, spec.logits_scale, spec.logits_softcap)
        return self._group.gather(own, [len(words) for words in self._words])

    def check_finite(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> None:
        """Run one forward and its logits; raise NumericsError naming the first part that gives NaN or Inf."""
        self.check_logits(last_finite(self.parts(token_ids, inputs, kv)))

    def check_logits(self, hidden: Tensor) -> None:
        """Raise NumericsError where hidden states behind the final norm, or their logits, are not finite."""
        last_finite([("the final norm", hidden), ("the output matrix", self.logits(hidden))])

    def parts(
        self, entering: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]
    ) -> Iterator[tuple[str, Tensor]]:
        """A forward part by part, each with a name for people; the last is what `forward` gives."""
        ops, spec, weights = self.ops, self.spec, self.weights
        x = entering
        if self.part.has_ends:
            x = self._embed(entering)
            yield "the embedding", x
        normed = ops.rms_norm(x, weights.layers[0].attention_norm, spec.norm_eps)
        layers = zip(self.part.layers, weights.layers, self._next_norms, kv, strict=True)
        for i, layer_weights, next_norm, layer_kv in layers:
            mixed = self._attention(normed, spec.layers[i], layer_weights, inputs, layer_kv)
            normed, x = self._add_norm(mixed, x, layer_weights.mlp_norm)
            normed, x = self._add_norm(self._mlp(normed, layer_weights), x, next_norm)
            yield f"layer {i}", x
        if self.is_whole:
            yield "the final norm", normed

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[M, H]. Each rank looks up the words that it has."""
        ops, embedding, scale = self.ops, self.weights.embedding, self.spec.embedding_scale
        if self.part.size == 1:
            return ops.embedding(token_ids, embedding, scale)
        words = self._words[self.part.rank]
        mine = (token_ids >= words.start) & (token_ids < words.stop)
        rows = ops.embedding(torch.where(mine, token_ids - words.start, 0), embedding, scale)
        return self._group.all_reduce(torch.where(mine[:, None], rows, 0))

    def _attention(
        self, x: Tensor, layer: LayerSpec, weights: LayerWeights, inputs: AttentionInputs, kv: KVLayer
    ) -> Tensor:
        ops, spec = self.ops, self.spec
        rope = None if layer.rope is None else self.weights.ropes[layer.rope]
        qkv = self._linear(x, weights.qkv)
        q = ops.rope_kv_write(qkv, self.heads, inputs, kv, rope, weights.qk_norm)
        mixed = ops.attention(
            q, self.heads, inputs, kv, spec.attention_scale, layer.window, spec.attention_softcap
        )
        projected = self._merged(mixed, weights.o, weights.o_gather)
        return self._norm(projected, weights.after_attention_norm)

    def _mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        gated = self.ops.glu(self._linear(x, weights.gate_up), self.spec.activation)
        projected = self._merged(gated, weights.down, weights.down_gather)
        return self._norm(projected, weights.after_mlp_norm)

    def _linear(self, x: Tensor, pieces: Linear) -> Tensor:
        outputs = [self.ops.linear(x, piece) for piece in pieces]
        return outputs[0] if len(outputs) == 1 else self.ops.concat(outputs)

    def _merged(self, x: Tensor, pieces: Linear, gather: Gather | None) -> Tensor:
        """A matrix whose inputs the ranks have between them."""
        if gather is None:
            return self._group.all_reduce(self._linear(x, pieces))
        whole = self._group.all_gather(x, gather.inputs)
        return self._group.all_gather(self._linear(whole, pieces), gather.outputs)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.ops.rms_norm(x, weight, self.spec.norm_eps)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        return self.ops.add_rms_norm(x, residual, weight, spec.norm_eps, spec.residual_scale)


def last_finite(parts: Iterable[tuple[str, Tensor]]) -> Tensor:
    """The last of named values, all of which must be finite. Raises NumericsError."""
    for name, values in parts:
        if not torch.isfinite(values).all():
            raise NumericsError(
                f"{name} gives NaN or Inf: the checkpoint is damaged or badly quantized there"
            )
    return values
