"""Models that people run on GPUs, by their sizes alone: their weights lie on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantd.engine.devices import compute_dtype
from quantd.engine.layers.join import Piece
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.models.spec import DecoderSpec, LinearSpec
from quantd.engine.parallel import ALONE
from quantd.engine.shard import Gather, Part, Shares, output_shares
from quantd.engine.weights import DecoderWeights, LayerWeights
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.gpu.tuning import Gpu, Tuning
from quantd.kernels.gpu.weights import STRIP, GpuWeight, Kind
from quantd.kernels.ops import HeadShape, QKNorm, RopeTable
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight

META = torch.device("meta")
_BIAS = torch.zeros(STRIP)
GPUS = (
    Gpu("T4", 75, 40),
    Gpu("A100", 80, 108),
    Gpu("RTX 3060", 86, 28),
    Gpu("RTX 4090", 89, 128),
    Gpu("H100", 90, 132),
    Gpu("RTX 5090", 120, 170),
)


@dataclass(frozen=True)
class Form:
    """How a matrix is quantized. step: its scales; below 2**-14 they are kept in float32."""

    bits: int
    group: int
    symmetric: bool = True
    act_order: bool = False
    input_bits: int | None = None
    step: float = 2.0**-6


@dataclass(frozen=True)
class Model:
    """config: as in config.json. forms: of matrices by the last part of their name, None for plain ones.

    kv: formats of its cache. shares: (rank, of how many) that have launches of their own: narrower matrices
    and odd runs of groups, words of half a vocabulary, one key/value head.
    """

    config: Mapping[str, Any]
    form: Form | None
    forms: Mapping[str, Form | None] = field(default_factory=dict)
    kv: tuple[str, ...] = ("int8",)
    shares: tuple[tuple[int, int], ...] = ()

    @property
    def spec(self) -> DecoderSpec:
        return decoder_spec(self.config)

    @property
    def parts(self) -> Iterator[Part]:
        """All of it, shares, and stages of one layer."""
        layers = range(len(self.spec.layers))
        yield from (Part(layers, rank, size) for rank, size in ((0, 1), *self.shares))
        if len(layers) > 1:
            yield from (Part(range(i, i + 1)) for i in layers)

    def dtype(self, gpu: Gpu) -> torch.dtype:
        """Of activations."""
        return compute_dtype(self.config, self.spec, [META]) if gpu.has_dots else torch.float16

    def decoder(self, gpu: Gpu, same_bits: bool, part: Part) -> Decoder:
        ops = GpuOps("cpu", self.dtype(gpu), same_bits, tuning=Tuning(gpu))
        return _Maker(self, ops, part).decoder()


class OneOfMany:
    """A Group of which one rank is there. What the others would add has its sizes."""

    recordable = True

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x.new_empty(len(x), sum(widths))

    gather = all_gather

    def broadcast(self, x: Tensor) -> Tensor:
        return x


class _Maker:
    def __init__(self, model: Model, ops: GpuOps, part: Part) -> None:
        self._model = model
        self._spec = model.spec
        self._ops = ops
        self._part = part

    def decoder(self) -> Decoder:
        spec, part = self._spec, self._part
        embedding, head = self._vocabulary() if part.has_ends else (None, None)
        ropes = tuple(
            RopeTable(*torch.empty(2, spec.max_model_len, rope.rotary_dim // 2, device=META))
            for rope in spec.ropes
        )
        layers = (self._layer(),) * len(part.layers)
        weights = DecoderWeights(embedding, layers, self._norm(spec.hidden_size), head, ropes)
        return Decoder(spec, weights, self._ops, part, OneOfMany(part.size) if part.size > 1 else ALONE)

    def _vocabulary(self) -> tuple[GpuWeight, GpuWeight]:
        spec = self._spec
        n = len(output_shares(spec.vocab_size, self._part.size)[self._part.rank])
        embedding = self._packed(self._strip("embed_tokens", spec.hidden_size), n)
        if spec.tied:
            return embedding, embedding
        return embedding, self._packed(self._strip("lm_head", spec.hidden_size), n)

    def _layer(self) -> LayerWeights:
        spec, names = self._spec, self._spec.names
        qk_norm = QKNorm(*(self._norm(spec.heads.head_dim) for _ in range(2)), 1e-6) if names.q_norm else None
        after = [
            self._norm(spec.hidden_size) if name else None
            for name in (names.after_attention_norm, names.after_mlp_norm)
        ]
        strips = self._strip_of(spec.o("")), self._strip_of(spec.down(""))
        qkv_rows, (o, o_gather), (down, down_gather, inner) = _dealt_out(spec.heads, self._part, *strips)
        return LayerWeights(
            attention_norm=self._norm(spec.hidden_size),
            qkv=self._outputs(spec.qkv(""), qkv_rows),
            qk_norm=qk_norm,
            o=self._merging(o, o_gather),
            after_attention_norm=after[0],
            mlp_norm=self._norm(spec.hidden_size),
            gate_up=self._outputs(spec.gate_up(""), inner),
            down=self._merging(down, down_gather),
            after_mlp_norm=after[1],
            o_gather=o_gather and self._whole(o_gather),
            down_gather=down_gather and self._whole(down_gather),
        )

    def _norm(self, size: int) -> Tensor:
        return torch.empty(size, device=META)

    def _outputs(self, linear: LinearSpec, rows: Tensor | None) -> tuple[GpuWeight]:
        """A matrix of which these outputs are here, None for all."""
        n = sum(linear.num_outputs) if rows is None else len(rows)
        return (self._packed(self._strip_of(linear), n),)

    def _merging(self, strip: Piece, gather: Gather | None) -> tuple[GpuWeight]:
        """A matrix into the residual stream; with a `gather` it gives a part of that."""
        n = self._spec.hidden_size
        return (self._packed(strip, n if gather is None else self._whole(gather).outputs[self._part.rank]),)

    def _whole(self, gather: Gather) -> Gather:
        """What a strip's is for the whole matrix."""
        outputs = output_shares(self._spec.hidden_size, self._part.size)
        return Gather(gather.inputs, tuple(map(len, outputs)))

    def _strip_of(self, linear: LinearSpec) -> Piece:
        name = linear.modules[0]
        has_bias = any(name.endswith(f".{biased}") for biased in self._spec.names.biases)
        return self._strip(name.rpartition(".")[2], linear.num_inputs, _BIAS if has_bias else None)

    def _strip(self, name: str, k: int, bias: Tensor | None = None) -> Piece:
        """The first outputs of a matrix."""
        plain = self._model.form if name not in ("embed_tokens", "lm_head") else None
        form = self._model.forms.get(name, plain)
        return Piece(_plain(k) if form is None else _quantized(k, form), bias)

    def _packed(self, strip: Piece, n: int) -> GpuWeight:
        """A strip, packed as any weight, and made as large as it should be."""
        small = self._ops.pack(strip.weight, strip.bias)
        found = {field.name: getattr(small, field.name) for field in fields(small)}
        tensors = {name: value.to(META) for name, value in found.items() if isinstance(value, Tensor)}
        if small.kind is Kind.DENSE:
            tensors["low"] = torch.empty(n, small.padded_k, dtype=small.low.dtype, device=META)
        if small.bias is not None:
            tensors["bias"] = torch.empty(n, device=META)
        return replace(small, shape=(n, small.shape[1]), **tensors)


@cache
def _dealt_out(
    heads: HeadShape, part: Part, o: Piece, down: Piece
) -> tuple[Tensor | None, tuple[Piece, Gather | None], tuple[Piece, Gather | None, Tensor | None]]:
    """What Shares makes of a layer's matrices. The same strips every time, so that they are packed once."""
    shares = Shares(heads, part)
    return shares.qkv(), shares.o(o), shares.down(down)


@cache
def _plain(k: int) -> Weight:
    return DenseWeight(torch.zeros(STRIP, k))


@cache
def _quantized(k: int, form: Form) -> Weight:
    group = form.group if form.group > 0 else k
    scale = torch.full((STRIP, -(-k // group)), form.step)
    zero = 2 ** (form.bits - 1) if form.symmetric else 2 ** (form.bits - 1) - 1
    perm = torch.arange(k).flip(0) if form.act_order else None
    codes = torch.zeros(STRIP, k, dtype=torch.uint8)
    return QuantizedWeight(codes, scale, -scale * zero, form.bits, group, perm, form.input_bits)


def _config(model_type: str, heads: tuple[int, int, int], sizes: tuple[int, int, int], **more: Any) -> Any:
    """heads: of queries, of keys, their size. sizes: hidden, of the MLP, of the vocabulary."""
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("hidden_size", "intermediate_size", "vocab_size")
    return {
        "model_type": model_type,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **dict(zip(keys, (*heads, *sizes), strict=True)),
        **more,
    }


_LLAMA_8B = _config("llama", (32, 8, 128), (4096, 14336, 128256), max_position_embeddings=131072)
_LLAMA_FP16 = _LLAMA_8B | {"dtype": "float16"}
_MISTRAL = _config("mistral", (32, 8, 128), (4096, 14336, 32002), dtype="float16", sliding_window=None)
_QWEN2 = _config("qwen2", (28, 4, 128), (3584, 18944, 152064), dtype="float16")
_QWEN2_72B = _config("qwen2", (64, 8, 128), (8192, 29568, 152064))
_SMOLLM2 = _config("llama", (9, 3, 64), (576, 1536, 49152), tie_word_embeddings=True)
_DANUBE = _config("mistral", (32, 8, 80), (2560, 6912, 32000), sliding_window=4096)
_PHI3 = _config("phi3", (32, 32, 96), (3072, 8192, 32064), sliding_window=2047)
_SLIDING = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
_GEMMA2 = _config("gemma2", (16, 8, 256), (3584, 14336, 256000), **_SLIDING)
_GEMMA3 = _config("gemma3_text", (4, 1, 256), (1152, 6912, 262144), **_SLIDING)

_W4 = Form(4, 128)
_ALL_KV = ("int8", "fp16", "bf16", "fp32")

MODELS = {
    "llama w4": Model(_LLAMA_8B, _W4, kv=_ALL_KV),
    "llama fp16 w4 act-order asym": Model(
        _LLAMA_FP16, Form(4, 128, symmetric=False, act_order=True), kv=_ALL_KV, shares=((0, 2),)
    ),
    "llama w3": Model(_LLAMA_8B, Form(3, 128, symmetric=False)),
    "llama fp16 w3": Model(_LLAMA_FP16, Form(3, 128)),
    "llama w2 g64": Model(_LLAMA_8B, Form(2, 64, symmetric=False)),
    "llama fp16 w2 g64": Model(_LLAMA_FP16, Form(2, 64, symmetric=False)),
    "llama w8": Model(_LLAMA_8B, Form(8, 128)),
    "llama w8a8": Model(_LLAMA_8B, Form(8, 0, input_bits=8), shares=((0, 2), (2, 3))),
    "llama fp16 w8a8": Model(_LLAMA_FP16, Form(8, 0, input_bits=8), shares=((0, 8),)),
    "llama plain": Model(_LLAMA_8B, None),
    "mistral w8 whole": Model(_MISTRAL, Form(8, 0), shares=((0, 2), (1, 2))),
    "qwen2 w4": Model(_QWEN2, _W4, {"lm_head": Form(8, 128)}, shares=((0, 8), (7, 8))),
    "qwen2 72b w4": Model(_QWEN2_72B, _W4, shares=((0, 2), (1, 2), (0, 8))),
    "smollm2 gguf q4_1": Model(
        _SMOLLM2,
        Form(4, 32, symmetric=False),
        {"embed_tokens": Form(8, 32)},
        kv=_ALL_KV,
        shares=((0, 2), (1, 2)),
    ),
    "llama gguf q4_k_m": Model(
        _LLAMA_8B,
        Form(4, 32, symmetric=False, step=2.0**-15),
        {"down_proj": Form(6, 16), "embed_tokens": Form(4, 32, symmetric=False), "lm_head": Form(6, 16)},
        shares=((2, 3),),
    ),
    "mistral gguf q3_k_m": Model(
        _MISTRAL,
        Form(3, 16),
        {"down_proj": Form(5, 32, symmetric=False), "o_proj": Form(2, 16)},
        shares=((2, 3),),
    ),
    "danube w4": Model(_DANUBE, _W4, kv=_ALL_KV),
    "phi3 w4": Model(_PHI3, _W4, kv=_ALL_KV),
    "gemma2 w4": Model(_GEMMA2, _W4, kv=_ALL_KV),
    "gemma3 w4": Model(
        _GEMMA3 | {"sliding_window": 512}, Form(4, 32), {"embed_tokens": Form(6, 16)}, shares=((0, 2),)
    ),
}
