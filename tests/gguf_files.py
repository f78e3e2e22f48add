"""GGUF files for tests, written with the `gguf` package the way llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

END = "<|im_end|>"
START = "<|im_start|>"


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]


MERGES = ["Ġ t", "h e", "Ġt he", "i n", "a t"]
TOKENS = [START, END, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm", size: int = len(TOKENS)) -> None:
    """A byte-level vocabulary, padded to `size` tokens."""
    padding = [f"[PAD{index}]" for index in range(len(TOKENS), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*TOKENS, *padding])
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2), *[5] * len(padding)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A random transformers model whose norms and biases are not at their initial values."""
    config = CONFIG_MAPPING[model_type](**(SIZES | {"pad_token_id": None} | overrides))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def write_model(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """`model` as a GGUF file: matrices of layers in `kind`, the rest F32; `metadata` without the prefix."""
    writer = gguf.GGUFWriter(path, architecture)
    add_shape(writer, architecture, model.config, metadata or {})
    add_tokenizer(writer, size=model.config.vocab_size)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = converted(name, tensor.numpy(), architecture, model.config)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        used = kind if values.ndim == 2 and ".layers." in name else Kind.F32
        writer.add_tensor(target, gguf.quants.quantize(values, used), raw_dtype=used)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    finish(writer)


def add_shape(writer: gguf.GGUFWriter, architecture: str, config: Any, metadata: dict[str, Any]) -> None:
    """The keys every converter writes, then `metadata`."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }[type(value)]
        add(f"{architecture}.{key}", value)


def converted(name: str, values: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    """What llama.cpp's converter stores for a tensor (conversion/llama.py permute, conversion/gemma.py)."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module = name.split(".")[-2]
    if architecture in ("llama", "granite", "smollm3") and module in heads:
        halves = values.reshape(heads[module], 2, len(values) // heads[module] // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything out and close."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny(path: Path, **tokenizer: Any) -> None:
    """The smallest GGUF that imports: one Llama layer of 32 in Q8_0, made without transformers."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    add_tokenizer(writer, **tokenizer)
    rng = np.random.default_rng(0)
    matrices = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32} | dict.fromkeys(
        ("ffn_gate", "ffn_up", "ffn_down"), 32
    )
    embedding = rng.standard_normal((len(TOKENS), 32), np.float32)
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(embedding, Kind.Q8_0), raw_dtype=Kind.Q8_0)
    for name, rows in matrices.items():
        blocks = gguf.quants.quantize(rng.standard_normal((rows, 32), np.float32), Kind.Q8_0)
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=Kind.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    finish(writer)
