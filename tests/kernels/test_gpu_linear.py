"""Linear layers, logits and embeddings on packed weights against exact products, and bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_weights import TURING, exact, quantized, relative_error, split_tuning
from torch.utils._python_dispatch import TorchDispatchMode

from quantd.kernels.gpu import linear as layers
from quantd.kernels.gpu import weights as gpu_weights
from quantd.kernels.gpu.dequantize import embedding
from quantd.kernels.gpu.inputs import Inputs
from quantd.kernels.gpu.linear import linear, logits
from quantd.kernels.gpu.tiled import shape_of
from quantd.kernels.gpu.tuning import Gpu, Tuning, gpu_of
from quantd.kernels.gpu.weights import Kind, pack, plane_bits
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight
from quantd.quant.checkpoint import open_checkpoint

TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 4.5e-3}
if not torch.cuda.is_available():
    # Of float32 no engine makes a product, and a GPU, which has no dots of it, takes long to compile one.
    TOLERANCE = {torch.float32: 1e-6} | TOLERANCE
FINEST = next(iter(TOLERANCE))


@pytest.fixture(autouse=True)
def seed(poisoned_outputs: None) -> None:
    torch.manual_seed(0)


@pytest.fixture
def tuning(gpu_device: str) -> Tuning:
    return Tuning(gpu_of(torch.device(gpu_device)))


def check(
    weight: Weight,
    num_rows: int,
    dtype: torch.dtype,
    tuning: Tuning,
    device: str,
    same_bits: bool = False,
) -> None:
    """linear gives the exact result, but for rounding."""
    n, k = weight.shape
    x, bias = torch.randn(num_rows, k).to(dtype), torch.randn(n)
    out = linear(x.to(device), pack(weight, bias, device, dtype), tuning, same_bits)
    assert out.dtype == dtype
    assert relative_error(out, exact(x.float(), weight, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group_size", "k"), [(128, 300), (64, 128), (32, 75), (16, 48), (75, 75)])
def test_every_layout(bits: int, group_size: int, k: int, tuning: Tuning, gpu_device: str) -> None:
    check(quantized(37, k, bits, group_size), 3, FINEST, tuning, gpu_device)


@pytest.mark.parametrize("bits", [1, 5, 6, 7])
def test_bits_between(bits: int, tuning: Tuning, gpu_device: str) -> None:
    check(quantized(19, 130, bits, 64), 2, FINEST, tuning, gpu_device)


@pytest.mark.parametrize("group_size", [1, 7, 24, 48, 100])
def test_odd_group_sizes(group_size: int, tuning: Tuning, gpu_device: str) -> None:
    check(quantized(17, 130, 4, group_size, perm=True), 2, FINEST, tuning, gpu_device)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_half_precision(bits: int, symmetric: bool, tuning: Tuning, gpu_device: str) -> None:
    weight = quantized(37, 256, bits, 128, symmetric=symmetric)
    check(weight, 3, torch.float16, tuning, gpu_device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 17, 33, 129])
def test_any_number_of_rows(num_rows: int, dtype: torch.dtype, tuning: Tuning, gpu_device: str) -> None:
    check(quantized(37, 128, 4, 64, perm=True), num_rows, dtype, tuning, gpu_device)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_plain_weights(dtype: torch.dtype, tuning: Tuning, gpu_device: str) -> None:
    check(DenseWeight(torch.randn(33, 70).to(dtype)), 5, dtype, tuning, gpu_device)


@pytest.mark.parametrize(
    "name", ["4b-g32-sym-desc", "3b-g32-sym", "8b-gm1-asym", "4b-g32-v2", "w8a8-dynamic"]
)
def test_checkpoints_of_other_tools(
    name: str, fixture_folders: dict[str, Path], tuning: Tuning, gpu_device: str
) -> None:
    (folder,) = (folder for key, folder in fixture_folders.items() if key.endswith(name))
    checkpoint = open_checkpoint(folder)
    module, shape = "model.layers.1.mlp.down_proj", (128, 256)
    weight = checkpoint.linear(module, shape)
    assert isinstance(weight, QuantizedWeight)
    for dtype in TOLERANCE:
        check(weight, 2, dtype, tuning, gpu_device)


WEIGHTS: dict[str, Weight] = {
    "symmetric": quantized(37, 192, 4, 64, symmetric=True),
    "offset, act-order, planes": quantized(37, 192, 3, 64, perm=True),
    "one scale": quantized(37, 192, 8, 192),
    "int8 inputs": quantized(37, 192, 8, 192, symmetric=True, input_bits=8),
    "plain": DenseWeight(torch.randint(-2000, 2000, (37, 192)) / 512),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_does_not_depend_on_its_company(name: str, gpu_device: str) -> None:
    dtype, bias = torch.float16 if name == "symmetric" else FINEST, torch.randn(37)
    weight = pack(WEIGHTS[name], bias, gpu_device, dtype)
    tuning = split_tuning(shape_of(weight, dtype), splits=3)
    x = torch.randn(130, 192).to(gpu_device, dtype)
    whole = linear(x, weight, tuning, same_bits=True)
    assert relative_error(whole, exact(x.cpu().float(), WEIGHTS[name], bias)) < TOLERANCE[dtype]
    for num_rows in (1, 2, 7, 32, 33, 128):
        assert torch.equal(linear(x[:num_rows], weight, tuning, same_bits=True), whole[:num_rows]), num_rows
    assert torch.equal(linear(x[-7:], weight, tuning, same_bits=True), whole[-7:])


def test_rows_up_to_128_have_the_same_bits_unasked(gpu_device: str, tuning: Tuning) -> None:
    weight = pack(WEIGHTS["symmetric"], None, gpu_device, torch.float16)
    x = torch.randn(128, 192).to(gpu_device, torch.float16)
    whole = linear(x, weight, tuning)
    for i in (0, 127):
        assert torch.equal(linear(x[i : i + 1], weight, tuning)[0], whole[i])


def test_a_large_matrix_is_dequantized_in_parts(
    monkeypatch: pytest.MonkeyPatch, tuning: Tuning, gpu_device: str
) -> None:
    monkeypatch.setattr(layers, "_WORKSPACE_BYTES", 40 * 128 * 4)  # 32 outputs, whole strips
    check(quantized(100, 128, 4, 32), 130, FINEST, tuning, gpu_device)


@pytest.mark.parametrize("num_rows", [1, 5, 25])
@pytest.mark.parametrize("name", ["offset, act-order, planes", "one scale", "plain"])
def test_without_tensor_cores(name: str, num_rows: int, gpu_device: str) -> None:
    check(WEIGHTS[name], num_rows, torch.float16, Tuning(TURING), gpu_device)
    weight, x = WEIGHTS[name], torch.randn(num_rows, 192).half()
    on_gpu = pack(weight, None, gpu_device, torch.float16)
    out = logits(x.to(gpu_device), on_gpu, Tuning(TURING), 0.5, 30.0)
    assert relative_error(out, 30 * torch.tanh(exact(x.float(), weight) / 60)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("bits", "group_size", "k"),
    [
        *((bits, group, k) for bits in (2, 3, 4, 8) for group, k in ((128, 128), (32, 75), (16, 48))),
        *((bits, 64, 64) for bits in (1, 5, 6)),
        (4, 7, 30),
    ],
)
def test_every_layout_without_tensor_cores(bits: int, group_size: int, k: int, gpu_device: str) -> None:
    weight, x = quantized(37, k, bits, group_size, perm=group_size == 7), torch.randn(3, k).half()
    on_gpu = pack(weight, None, gpu_device, torch.float16)
    out = logits(x.to(gpu_device), on_gpu, Tuning(TURING))
    # Sums are of float32, and codes exact: what is left is scales and offsets in fp16.
    assert relative_error(out, exact(x.float(), weight)) < 5e-4


@pytest.mark.parametrize("weight", [quantized(37, 96, 3, 32, perm=True), DenseWeight(torch.randn(37, 192))])
def test_same_bits_without_tensor_cores(weight: Weight, gpu_device: str) -> None:
    """In groups of eight rows, in splits; of packed weights up to 24 rows unasked."""
    bias = torch.randn(37)
    packed = pack(weight, bias, gpu_device, torch.float16)
    tuning = split_tuning(shape_of(packed, torch.float16), 3, TURING)
    x = torch.randn(11, weight.shape[1]).to(gpu_device, torch.float16)
    whole = linear(x, packed, tuning, same_bits=True)
    assert relative_error(whole, exact(x.cpu().float(), weight, bias)) < TOLERANCE[torch.float16]
    asked = packed.kind is Kind.DENSE
    for first, last in ((0, 1), (10, 11), (1, 3), (3, 11)):
        assert torch.equal(linear(x[first:last], packed, tuning, asked), whole[first:last]), (first, last)


AMPERE = Gpu("ampere", 86, 84)
ROWS = (1, 24, 512)


@pytest.mark.parametrize(
    ("gpu", "name", "same_bits", "of_linear", "of_logits"),
    [
        (TURING, "symmetric", False, "gemv gemv vendor", "gemv gemv vendor"),
        (TURING, "symmetric", True, "gemv gemv gemv", "gemv gemv gemv"),
        (TURING, "plain", False, "vendor vendor vendor", "vendor vendor vendor"),
        (TURING, "plain", True, "gemv gemv gemv", "gemv gemv gemv"),
        (AMPERE, "symmetric", False, "tiled tiled vendor", "tiled tiled tiled"),
        (AMPERE, "symmetric", True, "tiled tiled tiled", "tiled tiled tiled"),
        (AMPERE, "plain", False, "vendor vendor vendor", "tiled tiled tiled"),
        (AMPERE, "plain", True, "tiled tiled tiled", "tiled tiled tiled"),
        (AMPERE, "int8 inputs", False, "tiled tiled tiled", "tiled tiled tiled"),
    ],
)
def test_which_product_runs(
    gpu: Gpu, name: str, same_bits: bool, of_linear: str, of_logits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    for function, path in (("gemv", "gemv"), ("matmul", "tiled"), ("_vendor", "vendor")):
        monkeypatch.setattr(layers, function, lambda *_, path=path: taken.append(path))
    weight, tuning = pack(WEIGHTS[name], None, "cpu", torch.float16), Tuning(gpu)
    monkeypatch.setattr(layers, "prepare", lambda x, weight: Inputs(x, None, None))
    for num_rows in ROWS:
        linear(torch.zeros(num_rows, 192).half(), weight, tuning, same_bits)
    for num_rows in ROWS:
        logits(torch.zeros(num_rows, 192).half(), weight, tuning, same_bits=same_bits)
    assert taken == [*of_linear.split(), *of_logits.split()]


def test_int8_inputs_without_tensor_cores(gpu_device: str) -> None:
    weight, bias = WEIGHTS["int8 inputs"], torch.randn(37)
    on_gpu = pack(weight, bias, gpu_device, torch.float16, int8_dots=False)
    for num_rows in (1, 3):
        x = torch.randn(num_rows, 192).half()
        out = linear(x.to(gpu_device), on_gpu, Tuning(TURING))
        assert relative_error(out, exact(x.float(), weight, bias)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bfloat16_codes_are_exact(bits: int, tuning: Tuning, gpu_device: str) -> None:
    weight = quantized(37, 128, bits, 64, symmetric=True)
    chosen = torch.tensor([0, 15, 77, 127])
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    x[range(4), chosen] = 1.0
    out = logits(x.to(gpu_device), pack(weight, None, gpu_device, torch.bfloat16), tuning)
    assert torch.equal(out.cpu(), weight.dequantize()[:, chosen].T)


BFLOAT16_WEIGHTS: dict[str, Weight] = {
    **{f"W{bits}A16": quantized(37, 192, bits, 64, perm=bits == 4) for bits in (2, 3, 4, 6, 8)},
    "W8A16, one scale": quantized(37, 192, 8, 192),
    "W8A8": quantized(37, 192, 8, 192, symmetric=True, input_bits=8),
    "plain": DenseWeight(torch.randn(37, 192).bfloat16()),
}


@pytest.mark.parametrize("name", BFLOAT16_WEIGHTS)
def test_bfloat16_products(name: str, gpu_device: str) -> None:
    """Through tensor cores for any number of rows, in splits."""
    weight = BFLOAT16_WEIGHTS[name]
    shape = shape_of(pack(weight, None, gpu_device, torch.bfloat16), torch.bfloat16)
    for num_rows in (1, 17, 33, 129):
        check(weight, num_rows, torch.bfloat16, split_tuning(shape, 3), gpu_device, same_bits=True)


@pytest.mark.parametrize("name", ["offset, act-order, planes", "plain"])
@pytest.mark.parametrize(("scale", "softcap"), [(0.3, 0.0), (1.0, 5.0)])
def test_logits(name: str, scale: float, softcap: float, gpu_device: str) -> None:
    weight, bias, x = WEIGHTS[name], torch.randn(37), torch.randn(3, 192).half()
    on_gpu = pack(weight, bias, gpu_device, torch.float16)
    for splits in (1, 3):
        tuning = split_tuning(shape_of(on_gpu, torch.float16), splits)
        out = logits(x.to(gpu_device), on_gpu, tuning, scale, softcap)
        expected = exact(x.float(), weight, bias) * scale
        expected = softcap * torch.tanh(expected / softcap) if softcap else expected
        assert out.dtype == torch.float32
        assert relative_error(out, expected) < 2e-3


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("perm", [False, True])
def test_embedding_rows_are_the_weights(bits: int, perm: bool, gpu_device: str) -> None:
    weight = quantized(37, 75, bits, 64 if perm else 16, symmetric=True, perm=perm)
    ids = torch.tensor([36, 0, 17, 17], dtype=torch.int32)
    out = embedding(ids.to(gpu_device), pack(weight, None, gpu_device, torch.float16), 1.5)
    assert out.dtype == torch.float32
    assert torch.equal(out.cpu(), weight.dequantize()[ids] * 1.5)


def test_embedding_of_plain_weights_and_of_no_tokens(gpu_device: str) -> None:
    values = torch.randn(20, 70).half()
    on_gpu = pack(DenseWeight(values), None, gpu_device, torch.float16)
    ids = torch.tensor([19, 0, 3], dtype=torch.int32)
    assert torch.equal(embedding(ids.to(gpu_device), on_gpu, 2.0).cpu(), values[ids].float() * 2)
    codes = pack(quantized(20, 64, 4, 32), None, gpu_device, torch.float16)
    assert embedding(ids[:0].to(gpu_device), codes).shape == (0, 64)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["symmetric", "one scale", "int8 inputs", "plain"])
def test_what_is_not_finite_stays_so_in_its_row(
    name: str, bad: float, tuning: Tuning, gpu_device: str
) -> None:
    weight = pack(WEIGHTS[name], None, gpu_device, FINEST)
    x = torch.randn(3, 192).to(FINEST)
    x[1, 40] = bad
    out = linear(x.to(gpu_device), weight, tuning, same_bits=True)
    assert not torch.isfinite(out[1]).any()
    assert torch.isfinite(out[::2]).all()


def test_inputs_need_not_be_contiguous_and_may_be_none(tuning: Tuning, gpu_device: str) -> None:
    weight = quantized(20, 64, 4, 32)
    on_gpu = pack(weight, None, gpu_device, FINEST)
    x = torch.randn(64, 5).to(FINEST).T
    out = linear(x.to(gpu_device), on_gpu, tuning)
    assert relative_error(out, exact(x.float(), weight)) < TOLERANCE[FINEST]
    assert linear(x[:0].to(gpu_device), on_gpu, tuning).shape == (0, 20)


@pytest.mark.parametrize(
    ("bits", "group_size", "bits_a_weight"),
    [
        (4, 128, 4 + 16 / 128),
        (3, 128, 3 + 16 / 128),
        (2, 64, 2 + 16 / 64),
        (8, 512, 8 + 16 / 512),
        (6, 32, 6.5),
    ],
)
def test_memory(bits: int, group_size: int, bits_a_weight: float) -> None:
    weight = pack(quantized(48, 512, bits, group_size, symmetric=True), None, "cpu", torch.float16)
    assert weight.shape == (48, 512) and weight.kind is Kind.PACKED
    assert weight.nbytes == 48 * 512 * bits_a_weight / 8
    assert weight.low.is_contiguous() and weight.low.data_ptr() % 16 == 0


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and not str(func).startswith("aten.copy_"):
            self.num_bytes = max(self.num_bytes, out.nbytes)
        return out


@pytest.mark.parametrize("name", WEIGHTS)
def test_packing_takes_little_beside_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(WEIGHTS[name], None, "cpu", torch.float16)
    monkeypatch.setattr(gpu_weights, "_PART_CODES", 16 * 192)
    with Largest() as made:
        parts = pack(WEIGHTS[name], None, "cpu", torch.float16)
    assert made.num_bytes <= max(whole.low.nbytes, 2 * 16 * 192)
    assert torch.equal(parts.low, whole.low)
    if whole.high is not None:
        assert parts.high is not None and torch.equal(parts.high, whole.high)


def test_planes_fill_words() -> None:
    for bits in range(1, 9):
        for block_k in (16, 32, 64, 128):
            low, high = plane_bits(bits, block_k)
            assert bits <= low + high <= 8
            assert all(width * block_k % 64 == 0 for width in (low, high))


def test_one_more_weight_changes_no_other(tuning: Tuning, gpu_device: str) -> None:
    """Outputs stand in strips of sixteen; the last is padded."""
    weight, x = quantized(33, 64, 4, 32), torch.randn(2, 64).to(FINEST)
    fewer = QuantizedWeight(weight.codes[:32], weight.scale[:32], weight.offset[:32], 4, 32)
    outs = [linear(x.to(gpu_device), pack(w, None, gpu_device, FINEST), tuning) for w in (weight, fewer)]
    assert torch.equal(outs[0][:, :32], outs[1])
