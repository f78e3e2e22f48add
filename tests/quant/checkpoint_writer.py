"""Slow packers and decoders for tests, written from the format descriptions with Python integers.

They share nothing with quantd.quant.packing, so agreement means something.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_row(codes: list[int], bits: int) -> list[int]:
    """A dense little-endian bit stream as signed 32-bit words."""
    total = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    size = -(-len(codes) * bits // 32)
    return [
        int.from_bytes(total.to_bytes(size * 4, "little")[i : i + 4], "little", signed=True)
        for i in range(0, size * 4, 4)
    ]


def unpack_row(words: list[int], bits: int, count: int) -> list[int]:
    total = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return [(total >> (bits * i)) & (2**bits - 1) for i in range(count)]


def pack_rows(codes: np.ndarray, bits: int) -> torch.Tensor:
    return torch.tensor([pack_row(row, bits) for row in codes.tolist()], dtype=torch.int32)


def pack_padded(codes: np.ndarray, bits: int) -> torch.Tensor:
    """32 // bits codes a word, the remaining bits unused."""
    per = 32 // bits
    return torch.tensor(
        [[pack_row(row[i : i + per], bits)[0] for i in range(0, len(row), per)] for row in codes.tolist()],
        dtype=torch.int32,
    )


def pack_awq(codes: np.ndarray) -> torch.Tensor:
    """[R, C] -> [R, C / 8] with the eight nibbles of a word interleaved."""
    order = np.concatenate([np.array(AWQ_COLUMNS) + 8 * word for word in range(codes.shape[1] // 8)])
    return pack_rows(codes[:, order], 4)


def gptq_tensors(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int, g_idx: Any = None, version: int = 1
) -> dict[str, torch.Tensor]:
    """codes [K, N], zeros and scales [G, N]."""
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    pieces = {
        "qweight": pack_rows(codes.T, bits).t().contiguous(),
        "qzeros": pack_rows(stored, bits),
        "scales": torch.from_numpy(scales).half(),
    }
    if g_idx is not None:
        pieces["g_idx"] = torch.tensor(np.asarray(g_idx), dtype=torch.int32)
    return pieces


def decode_gptq(pieces: dict[str, torch.Tensor], bits: int, version: int) -> np.ndarray:
    """float64 [N, K], one code at a time."""
    columns = pieces["qweight"].t().tolist()
    k = len(pieces["g_idx"])
    scales = pieces["scales"].double().numpy()
    zeros = np.array([unpack_row(row, bits, scales.shape[1]) for row in pieces["qzeros"].tolist()])
    zeros = (zeros + 1) % 2**bits if version == 1 else zeros
    codes = np.array([unpack_row(column, bits, k) for column in columns])
    groups = pieces["g_idx"].tolist()
    return np.array(
        [
            [scales[groups[i], n] * (codes[n, i] - zeros[groups[i], n]) for i in range(k)]
            for n in range(len(codes))
        ]
    )


def write_model(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None, **files: Any
) -> Path:
    """config.json (with `quantization` in it), model.safetensors, and any NAME=object as NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama"} | ({"quantization_config": quantization} if quantization else {})
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def under(module: str, pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{module}.{name}": tensor for name, tensor in pieces.items()}
