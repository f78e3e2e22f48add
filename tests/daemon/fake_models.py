"""Small tokenizers of every decoder family, and model folders without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

DATA = Path(__file__).parents[1] / "data"
QWEN_INFILL = (
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|endoftext|>",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_fallback_tokenizer(strips: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: a dummy prefix, byte tokens, `Strip` at the end of the decoder."""
    words = ["▁", "▁▁", "▁the", "▁a", "he", "t", "h", "e", "a", "▁é", "漢", "!", ".", ",", "▁'", "s", "n"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "▁"), ("h", "e"), ("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strips else []))
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    core.add_tokens([AddedToken("[INST]", special=False)])
    return core


def metaspace_tokenizer() -> tokenizers.Tokenizer:
    """SentencePiece in its newer spelling: one `Metaspace` on both sides."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁one", "▁two", "on", "e", "t", "w", "o", "▁é", "🧵", "."]
    core = tokenizers.Tokenizer(models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return core


def chat_tokenizer(tokens: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """The fixtures' byte-level BPE (512 ids) with ChatML's marks as ids 512 and 513, then `tokens`."""
    core = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer" / "tokenizer.json"))
    names = ("<|im_start|>", "<|im_end|>", *tokens)
    core.add_special_tokens([AddedToken(name, special=True) for name in names])
    return core


def write_model(
    folder: Path, template: str | None = CHATML, tokens: Sequence[str] = (), **config: object
) -> Path:
    """A model folder with everything but weights. tokens: special tokens beside ChatML's."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer(tokens).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "eos_token_id": 2})
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
