"""Making a GGUF file a model folder: the header is read once, everything it says is written beside it.

Torch-free. Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
chat_template.jinja, 1_Pooling/config.json and tensors.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.gguf_blocks import BLOCK_FORMATS, DENSE_BYTES
from quantd.quant.gguf_config import build_config, build_generation_config, build_pooling, family_of
from quantd.quant.gguf_families import TOP_LEVEL, Family
from quantd.quant.gguf_header import GgufHeader, read_header
from quantd.quant.gguf_index import INDEX_NAME, GgufIndex
from quantd.quant.gguf_tokenizer import Vocabulary, build_tokenizer, read_vocabulary

# Tensors that become part of config.json.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def import_gguf(file: Path, folder: Path) -> None:
    """Write into `folder` all that quantd needs beside the GGUF `file`; a file elsewhere is linked into it.

    Raises CheckpointError for a damaged or truncated file, UnsupportedModelError for an architecture,
    tokenizer or tensor type that quantd does not have. Nothing is written then.
    """
    header = read_header(file)
    family = family_of(header)
    _check_tensors(header, family)
    vocabulary = read_vocabulary(header)
    config = build_config(header, vocabulary)
    if config["vocab_size"] < len(vocabulary.tokens):
        raise CheckpointError(
            f"{file}: {len(vocabulary.tokens)} tokens but {config['vocab_size']} rows of token_embd.weight"
        )
    tokenizer = build_tokenizer(header, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / file.name).exists():
        (folder / file.name).symlink_to(file.resolve())
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if "tokenizer.chat_template" in header.metadata:
        (folder / "chat_template.jinja").write_text(header.text("tokenizer.chat_template"), "utf-8")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", build_generation_config(vocabulary))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(vocabulary, config))
    if (pooling := build_pooling(header)) is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        _write_json(folder / "1_Pooling" / "config.json", pooling)
    (folder / INDEX_NAME).write_bytes(msgspec.json.encode(_index(header)))


def _check_tensors(header: GgufHeader, family: Family) -> None:
    layer_names = set(family.layer_table.values())
    for tensor in header.tensors.values():
        if tensor.name in ROPE_TABLES:
            continue
        module, _, kind = tensor.name.rpartition(".")
        layer = re.fullmatch(r"blk\.\d+\.(\w+)", module)
        known = layer[1] in layer_names if layer else module in TOP_LEVEL.values()
        if not known or kind not in ("weight", "bias"):
            raise UnsupportedModelError(
                f"{header.path}: tensor {tensor.name!r} is not part of a {header.architecture} model that "
                "quantd knows"
            )
        if tensor.type not in BLOCK_FORMATS and tensor.type not in DENSE_BYTES:
            raise UnsupportedModelError(
                f"{header.path}: tensor {tensor.name!r} has type {tensor.type}, which is not supported "
                f"(known: {', '.join([*DENSE_BYTES, *BLOCK_FORMATS])})"
            )


def _index(header: GgufHeader) -> GgufIndex:
    tensors = [tensor for tensor in header.tensors.values() if tensor.name not in ROPE_TABLES]
    return GgufIndex(header.path.name, header.path.stat().st_size, header.architecture, tensors)


def _tokenizer_config(vocabulary: Vocabulary, config: dict[str, Any]) -> dict[str, Any]:
    texts = {f"{name}_token": vocabulary.special_text(name) for name in ("bos", "eos", "unk", "pad")}
    return {key: text for key, text in texts.items() if text is not None} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
