"""Tokenizers made from GGUF vocabularies against transformers and SentencePiece itself."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import END, START, byte_alphabet, finish, write_tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from quantd.quant.gguf_header import read_header
from quantd.quant.gguf_import import import_gguf
from quantd.quant.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer, read_vocabulary

SENTENCEPIECE = json.loads((Path(__file__).parents[1] / "data/gguf/sentencepiece.json").read_text())

TEXTS = [
    "Hello world!",
    "the cat in the hat",
    "  two   spaces  ",
    "tabs\tand\r\nnewlines\n\n  indented\n",
    "naïve café, e\u0301; Straße",
    "日本語のテキスト、中文文本。한국어",
    "🙂👩‍👩‍👧‍👦 zero\u200bwidth",
    "can't won't I'LL they've",
    "def f(x):\n    return x**2  # ¾ ² Ⅷ ٣\n",
    "\u0000\u0007control",
    f"{START}user\nhi{END}\n",
    "x" * 300,
    "",
]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def build(path: Path) -> Tokenizer:
    header = read_header(path)
    return build_tokenizer(header, read_vocabulary(header))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_smollm2_is_transformers_vocabulary_and_ids(smollm2: Path, model: Tokenizer) -> None:
    """transformers' conversion of the same file, on text without digits: it lacks SmolLM's digit split."""
    file = next(smollm2.glob("*.gguf"))
    theirs = AutoTokenizer.from_pretrained(smollm2, gguf_file=file.name)
    assert model.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        if not any(character.isnumeric() for character in text):
            assert ids(model, text) == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
    ],
)
def test_smollm2_splits_digits_like_the_published_tokenizer(
    model: Tokenizer, text: str, expected: list[int]
) -> None:
    assert ids(model, text) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(model: Tokenizer, text: str) -> None:
    assert model.decode(ids(model, text), skip_special_tokens=False) == text


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(model: Tokenizer, text: str) -> None:
    """SmolLM2's vocabulary lacks some control bytes, which its published tokenizer drops as well."""
    alphabet = byte_alphabet()
    assume(all(model.token_to_id(alphabet[byte]) is not None for byte in text.encode()))
    assert model.decode(ids(model, text), skip_special_tokens=False) == text


def test_transformers_opens_the_folder(smollm2: Path, model: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2)
    assert (theirs.bos_token, theirs.eos_token) == (START, END)
    for text in TEXTS:
        assert theirs.encode(text) == model.encode(text).ids
    messages = [{"role": "user", "content": "Hi"}]
    assert "<|im_start|>user\nHi<|im_end|>" in theirs.apply_chat_template(messages, tokenize=False)


def test_special_tokens_are_whole_and_dropped_from_text(model: Tokenizer) -> None:
    found = ids(model, f"{START}user\nhi{END}")
    assert (found[0], found[-1]) == (1, 2)
    assert model.decode(found) == "user\nhi"


def test_smollm2_ends_at_both_of_its_end_tokens(smollm2: Path) -> None:
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


# Where each published pre-tokenizer cuts; the ids follow from the cuts.
CUTS = {
    "smollm": ["ab", "1", "2", "3", "'", "LL", " x"],
    "gpt-2": ["ab", "123", "'", "LL", " x"],
    "llama-bpe": ["ab", "123", "'LL", " x"],
    "qwen2": ["ab", "1", "2", "3", "'LL", " x"],
    "tekken": ["ab", "1", "2", "3", "'LL", " x"],
    "gpt-4o": ["ab", "123", "'LL", " x"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers_cut_where_they_should(pre: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf", pre=pre)
    cutter: Any = build(tmp_path / "tiny.gguf").pre_tokenizer
    assert [piece.replace("Ġ", " ") for piece, _ in cutter.pre_tokenize_str("ab123'LL x")] == CUTS[pre]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(pre: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf", pre=pre)
    tokenizer = build(tmp_path / "tiny.gguf")
    for text in TEXTS:
        if not PRE_TOKENIZERS[pre].nfc or text.isascii():
            assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def write_sentencepiece(path: Path, **flags: bool) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SENTENCEPIECE["tokens"])
    writer.add_token_scores(SENTENCEPIECE["scores"])
    writer.add_token_types(SENTENCEPIECE["types"])
    writer.add_bos_token_id(SENTENCEPIECE["bos"])
    writer.add_eos_token_id(SENTENCEPIECE["eos"])
    writer.add_unk_token_id(SENTENCEPIECE["unk"])
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    finish(writer)


@pytest.mark.parametrize(("text", "expected"), SENTENCEPIECE["encoded"])
def test_sentencepiece_ids(text: str, expected: list[int], tmp_path: Path) -> None:
    """Encodings by the SentencePiece library of a BPE model it trained (420 tokens, byte fallback).

    Around added tokens it puts its space elsewhere than llama.cpp and `tokenizers` do, which agree.
    """
    write_sentencepiece(tmp_path / "spm.gguf")
    tokenizer = build(tmp_path / "spm.gguf")
    assert ids(tokenizer, text) == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == text.replace("▁", " ")


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    bos, eos = SENTENCEPIECE["bos"], SENTENCEPIECE["eos"]
    write_sentencepiece(tmp_path / "default.gguf")
    assert build(tmp_path / "default.gguf").encode("one").ids[0] == bos
    write_sentencepiece(tmp_path / "both.gguf", add_bos_token=True, add_eos_token=True)
    both = build(tmp_path / "both.gguf").encode("one").ids
    assert (both[0], both[-1]) == (bos, eos)
    write_sentencepiece(tmp_path / "none.gguf", add_bos_token=False)
    assert bos not in build(tmp_path / "none.gguf").encode("one").ids


def test_without_a_space_prefix_the_text_is_taken_as_it_is(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "spm.gguf", add_space_prefix=False)
    tokenizer = build(tmp_path / "spm.gguf")
    for text in (" one", "one", "  two"):
        assert tokenizer.decode(ids(tokenizer, text)) == text
    assert SENTENCEPIECE["tokens"][ids(tokenizer, "one")[0]][0] != "▁"


def test_the_tokenizer_of_a_folder_is_the_one_built(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf")
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    saved = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    built = build(tmp_path / "tiny.gguf")
    for text in TEXTS:
        assert saved.encode(text).ids == built.encode(text).ids
