"""From a checkpoint to packed weights: everything is checked by name and shape first, then read.

One matrix after another: an unpacked weight is gone before the next one is read. Where the pieces of
a joined matrix (queries, keys, values; the MLP's halves) are alike they become one packed weight. A rank
reads the layers of its stage and keeps its share of each matrix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantd.engine.layers.join import Piece, equal, join_alike
from quantd.engine.layers.rope import RopeSpec, rope_table
from quantd.engine.models.spec import DecoderSpec, LinearSpec
from quantd.engine.shard import Gather, Part, Shares, cut_outputs
from quantd.kernels.ops import Ops, PackedWeight, QKNorm, RopeTable
from quantd.kernels.weights import Weight
from quantd.quant.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Linear = tuple[PackedWeight, ...]
"""A matrix as packed pieces whose outputs stand side by side; mostly one."""

# Where tensors of the decoder begin: in a causal model, a multimodal one (transformers 4, 5), a bare one.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head", "language_model.lm_head")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norm weights are float32 [H], any offset added; None where the layer has no such norm.

    Ranks sum what o and down give, except where these have a Gather.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: QKNorm | None
    o: Linear
    after_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    after_mlp_norm: Tensor | None
    o_gather: Gather | None = None
    down_gather: Gather | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All that a decoder, or a rank's part of one, holds.

    head may be the same object as embedding; a stage that is not the first has neither. ropes: as in the
    spec.
    """

    embedding: PackedWeight | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: PackedWeight | None
    ropes: tuple[RopeTable, ...]

    @property
    def packed(self) -> list[PackedWeight]:
        """All packed weights; a tied output matrix once."""
        linears = [
            linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
        ]
        pieces = [self.embedding, self.head, *(piece for linear in linears for piece in linear)]
        return list({id(piece): piece for piece in pieces if piece is not None}.values())

    @property
    def nbytes(self) -> int:
        """Of all packed weights."""
        return sum(piece.nbytes for piece in self.packed)


def load_weights(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Progress,
    part: Part | None = None,
    device: torch.device = _CPU,
) -> DecoderWeights:
    """Check the whole checkpoint against `spec`, then read and pack it, or the part asked for.

    device: where norms and tables go, which are not packed. progress is called with (bytes done, bytes in
    all) as matrices are read. Raises CheckpointError or UnsupportedModelError, before any weight is read
    where the index shows the fault; RequestError where the model cannot be dealt out to so many ranks.
    """
    layout = Layout(spec, checkpoint)
    layout.check()
    layout.log_leftovers()
    return _Reader(layout, part or layout.whole, ops, progress, device).decoder()


class Layout:
    """Where this checkpoint keeps what the spec asks for. Modules and norms are named without `.weight`."""

    def __init__(self, spec: DecoderSpec, checkpoint: Checkpoint) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        prefix = _first(_PREFIXES, lambda prefix: checkpoint.has_module(f"{prefix}embed_tokens"))
        self.embedding = f"{prefix}embed_tokens"
        self.layers = [f"{prefix}layers.{i}" for i in range(len(spec.layers))]
        self.final_norm = f"{prefix}norm"
        self.head = _first(_HEADS, checkpoint.has_module)
        # A model with tied weights may have an output matrix of its own, a quantized one mostly.
        self.has_head = not spec.tied or checkpoint.has_module(self.head)

    @property
    def vocabulary_shape(self) -> tuple[int, int]:
        """Of the embedding and of the output matrix."""
        return self.spec.vocab_size, self.spec.hidden_size

    @property
    def whole(self) -> Part:
        """The part that is all of the decoder."""
        return Part(range(len(self.layers)))

    def modules(self, part: Part) -> Iterator[tuple[str, tuple[int, int]]]:
        """Every matrix in the checkpoint, with its shape, of which a part holds something."""
        if part.has_ends:
            yield self.embedding, self.vocabulary_shape
            if self.has_head:
                yield self.head, self.vocabulary_shape
        for i in part.layers:
            for linear in self.spec.linears(self.layers[i]):
                yield from linear.shapes()

    def norms(self) -> Iterator[tuple[str, int]]:
        """Every norm with its size."""
        for layer in self.layers:
            yield from self.spec.norms(layer)
        yield self.final_norm, self.spec.hidden_size

    def has_bias(self, module: str) -> bool:
        """Whether the architecture demands one, or the checkpoint has one all the same."""
        demanded = any(module.endswith(f".{name}") for name in self.spec.names.biases)
        return demanded or self.checkpoint.has(f"{module}.bias")

    def check(self) -> None:
        """Raise for the first tensor that is missing or does not fit."""
        for module, shape in self.modules(self.whole):
            self.checkpoint.check_linear(module, shape)
            if self.has_bias(module):
                self.checkpoint.check_tensor(f"{module}.bias", shape[:1])
        for norm, size in self.norms():
            self.checkpoint.check_tensor(f"{norm}.weight", (size,))

    def log_leftovers(self) -> None:
        """Name once what the checkpoint holds and the decoder does not use."""
        used = {name for name, _ in (*self.modules(self.whole), *self.norms())}
        left = [name for name in self.checkpoint.names() if name.rpartition(".")[0] not in used]
        # Old checkpoints store the rotary frequencies, which follow from the config.
        left = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
        if left:
            logger.debug("%s: %d tensors not used: %s", self.checkpoint.path, len(left), ", ".join(left))


class _Reader:
    """Reads what a checked layout names, as far as it is a rank's part."""

    def __init__(
        self, layout: Layout, part: Part, ops: Ops, progress: Progress, device: torch.device
    ) -> None:
        self._layout = layout
        self._part = part
        self._spec = layout.spec
        self._checkpoint = layout.checkpoint
        self._ops = ops
        self._progress = progress
        self._device = device
        self._shares = Shares(layout.spec.heads, part)
        self._num_values = sum(n * k for _, (n, k) in layout.modules(part))
        self._num_read = 0

    def decoder(self) -> DecoderWeights:
        embedding, head = self._vocabulary() if self._part.has_ends else (None, None)
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(self._layout.layers[i]) for i in self._part.layers),
            final_norm=self._norm(self._layout.final_norm, self._spec.hidden_size),
            head=head,
            ropes=tuple(map(self._rope, self._spec.ropes)),
        )

    def _vocabulary(self) -> tuple[PackedWeight, PackedWeight]:
        """Embedding and output matrix: one packed weight where they are tied or equal."""
        shape = self._layout.vocabulary_shape
        rows = self._shares.vocabulary(shape[0])
        weight = self._weight(self._layout.embedding, shape)
        embedding = self._pack(cut_outputs(Piece(weight, None), rows))
        if not self._layout.has_head:
            return embedding, embedding
        head = self._piece(self._layout.head, shape)
        if head.bias is None and equal(weight, head.weight):
            return embedding, embedding
        return embedding, self._pack(cut_outputs(head, rows))

    def _layer(self, prefix: str) -> LayerWeights:
        spec, names = self._spec, self._spec.names

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self._norm(f"{prefix}.{name}", spec.hidden_size)

        qkv = self._outputs(spec.qkv(prefix), self._shares.qkv())
        o, o_gather = self._o(prefix)
        # With act-order the groups of down decide which outputs of gate and up a rank computes.
        down, down_gather, inner = self._down(prefix)
        return LayerWeights(
            attention_norm=self._norm(f"{prefix}.{names.attention_norm}", spec.hidden_size),
            qkv=qkv,
            qk_norm=self._qk_norm(prefix),
            o=(o,),
            after_attention_norm=norm(names.after_attention_norm),
            mlp_norm=self._norm(f"{prefix}.{names.mlp_norm}", spec.hidden_size),
            gate_up=self._outputs(spec.gate_up(prefix), inner),
            down=(down,),
            after_mlp_norm=norm(names.after_mlp_norm),
            o_gather=o_gather,
            down_gather=down_gather,
        )

    def _o(self, prefix: str) -> tuple[PackedWeight, Gather | None]:
        piece, gather = self._shares.o(self._only_piece(self._spec.o(prefix)))
        return self._pack(piece), gather

    def _down(self, prefix: str) -> tuple[PackedWeight, Gather | None, Tensor | None]:
        piece, gather, inner = self._shares.down(self._only_piece(self._spec.down(prefix)))
        return self._pack(piece), gather, inner

    def _outputs(self, linear: LinearSpec, rows: Tensor | None) -> Linear:
        """A joined matrix, or only these of its outputs; each run of alike pieces packed as one weight."""
        pieces, first = [], 0
        for module, shape in linear.shapes():
            pieces.append(cut_outputs(self._piece(module, shape), _within(rows, first, shape[0])))
            first += shape[0]
        return tuple(self._pack(piece) for piece in join_alike(pieces))

    def _only_piece(self, linear: LinearSpec) -> Piece:
        ((module, shape),) = linear.shapes()
        return self._piece(module, shape)

    def _piece(self, module: str, shape: tuple[int, int]) -> Piece:
        return Piece(self._weight(module, shape), self._bias(module, shape))

    def _pack(self, piece: Piece) -> PackedWeight:
        return self._ops.pack(piece.weight, piece.bias)

    def _weight(self, module: str, shape: tuple[int, int]) -> Weight:
        weight = self._checkpoint.linear(module, shape)
        self._num_read += shape[0] * shape[1]
        total = self._checkpoint.weight_bytes
        self._progress(total * self._num_read // self._num_values, total)
        return weight

    def _bias(self, module: str, shape: tuple[int, int]) -> Tensor | None:
        if not self._layout.has_bias(module):
            return None
        return self._checkpoint.tensor(f"{module}.bias", shape[:1])

    def _norm(self, name: str, size: int) -> Tensor:
        return (self._checkpoint.tensor(f"{name}.weight", (size,)) + self._spec.norm_offset).to(self._device)

    def _rope(self, rope: RopeSpec) -> RopeTable:
        table = rope_table(rope, self._spec.max_model_len)
        return RopeTable(table.cos.to(self._device), table.sin.to(self._device))

    def _qk_norm(self, prefix: str) -> QKNorm | None:
        names, size = self._spec.names, self._spec.heads.head_dim
        if names.q_norm is None or names.k_norm is None:
            return None
        q, k = (self._norm(f"{prefix}.{name}", size) for name in (names.q_norm, names.k_norm))
        return QKNorm(q, k, self._spec.norm_eps)


def _within(rows: Tensor | None, first: int, size: int) -> Tensor | None:
    """Those of a joined matrix's rows that are of the piece that begins at `first`, as its own rows."""
    return None if rows is None else rows[(rows >= first) & (rows < first + size)] - first


def _first(candidates: Sequence[str], exists: Callable[[str], bool]) -> str:
    """The first that exists; where none does the usual one, for `check` to miss by name."""
    return next(filter(exists, candidates), candidates[0])
