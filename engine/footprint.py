"""What a model will take in memory, from its headers alone: the backend packs stand-ins of a few outputs.

What a packed weight takes grows by the same step with every 16 outputs, so two small ones tell of any size.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from quantd.engine.config import EngineConfig
from quantd.engine.layers.join import Piece, join_alike
from quantd.engine.models.spec import DecoderSpec, LinearSpec
from quantd.engine.rank_messages import RankLoaded
from quantd.engine.shard import Part, head_shares
from quantd.engine.split import World
from quantd.engine.weights import Layout
from quantd.kernels.ops import Ops
from quantd.kernels.weights import DenseWeight, Weight
from quantd.quant.checkpoint import Checkpoint
from quantd.quant.kv import FORMATS, KVShape, block_bytes

_STEP = 16
_Module = tuple[str, tuple[int, int]]


class Footprint:
    """Sizes of one model's weights as `ops` packs them, in bytes.

    Exact but where data decides: scales and offsets may all fit into fp16, which makes GGUF types a little
    smaller on a GPU, or not, which makes those of bfloat16 larger; and shares of ranks do not always divide.
    """

    def __init__(self, spec: DecoderSpec, checkpoint: Checkpoint, ops: Ops) -> None:
        self._spec = spec
        self._layout = Layout(spec, checkpoint)
        self._ops = ops
        self._known: dict[tuple[object, ...], int] = {}

    def check(self) -> None:
        """Raise what would keep the model from being loaded, as far as headers tell."""
        self._layout.check()

    def weight_bytes(self, part: Part) -> int:
        """All weights of a part."""
        size = self._vocabulary() if part.has_ends else 0
        for i in part.layers:
            size += sum(self._linear(linear) for linear in self._spec.linears(self._layout.layers[i]))
        return -(-size // part.size)

    def _vocabulary(self) -> int:
        layout, shape = self._layout, self._layout.vocabulary_shape
        embedding = self._run([(layout.embedding, shape)], has_bias=False)
        if not layout.has_head or (self._spec.tied and self._is_plain_copy()):
            return embedding
        return embedding + self._run([(layout.head, shape)], layout.has_bias(layout.head))

    def _is_plain_copy(self) -> bool:
        """Whether a tied model's own output matrix looks like its embedding written twice."""
        found = [self._stand_in(module, _STEP) for module in (self._layout.embedding, self._layout.head)]
        plain = [weight.values.dtype for weight in found if isinstance(weight, DenseWeight)]
        return len(plain) == 2 and plain[0] == plain[1]

    def _linear(self, linear: LinearSpec) -> int:
        """A joined matrix: each run of alike modules is one packed weight."""
        modules = list(linear.shapes())
        pieces = [Piece(self._stand_in(module, _STEP, k), None) for module, (_, k) in modules]
        size, first = 0, 0
        for run in join_alike(pieces):
            behind = first + run.weight.shape[0] // _STEP
            there = modules[first:behind]
            size += self._run(there, any(self._layout.has_bias(module) for module, _ in there))
            first = behind
        return size

    def _run(self, modules: Sequence[_Module], has_bias: bool) -> int:
        """One packed weight of several modules."""
        num_outputs, k = sum(n for _, (n, _) in modules), modules[0][1][1]
        alike = tuple(_form(self._stand_in(module, 1, k)) for module, _ in modules)
        key = (alike, num_outputs, k, has_bias)
        if key not in self._known:
            rest = num_outputs % _STEP
            small, larger = (self._packed(modules, rest + extra, has_bias) for extra in (_STEP, 2 * _STEP))
            measured = rest + _STEP * len(modules)
            self._known[key] = small + (num_outputs - measured) // _STEP * (larger - small)
        return self._known[key]

    def _packed(self, modules: Sequence[_Module], first_outputs: int, has_bias: bool) -> int:
        """What stand-ins take, the first with so many outputs, the others with a step's."""
        outputs = [first_outputs, *(_STEP for _ in modules[1:])]
        pieces = [
            Piece(self._stand_in(module, n, k), torch.zeros(n) if has_bias else None)
            for n, (module, (_, k)) in zip(outputs, modules, strict=True)
        ]
        (whole,) = join_alike(pieces)
        return self._ops.pack(whole.weight, whole.bias).nbytes

    def _stand_in(self, module: str, num_outputs: int, k: int | None = None) -> Weight:
        shape = num_outputs, self._spec.hidden_size if k is None else k
        return self._layout.checkpoint.stand_in(module, shape)


def _form(weight: Weight) -> tuple[object, ...]:
    """What tells stand-ins of one shape apart."""
    if isinstance(weight, DenseWeight):
        return (weight.values.dtype,)
    numbers = (float(weight.scale[0, 0]), float(weight.offset[0, 0]))
    return (weight.bits, weight.group_size, weight.perm is None, weight.input_bits, *numbers)


def foresee(
    config: EngineConfig, world: World, footprint: Footprint, spec: DecoderSpec, free: dict[str, int]
) -> list[RankLoaded]:
    """What the ranks will say once they are loaded. free: bytes of each device before that, in rank order."""
    devices, heads, ranks = list(free), spec.heads, []
    for rank in range(world.size):
        part, device = Part.of(world, rank), devices[rank % len(devices)]
        share = head_shares(heads, part.size)[part.rank].shape(heads.head_dim)
        shape = KVShape(len(part.layers), share.num_kv_heads, heads.head_dim, config.block_size)
        ranks.append(
            RankLoaded(
                device=device,
                weight_bytes=footprint.weight_bytes(part),
                block_bytes=block_bytes(FORMATS[config.kv_dtype], shape),
                available=free[device],
            )
        )
    return [msgspec.structs.replace(rank, available=rank.available - _taken(ranks, rank)) for rank in ranks]


def _taken(ranks: Sequence[RankLoaded], rank: RankLoaded) -> int:
    return sum(other.weight_bytes for other in ranks if other.device == rank.device)
