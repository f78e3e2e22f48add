"""Prompts towards a suffix: each family's layout, what users send as text, and room for files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from fake_models import CHATML, QWEN_INFILL, byte_fallback_tokenizer, chat_tokenizer, write_model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import CodeLlamaTokenizer

from quantd.daemon.capabilities import Capabilities, capabilities_of, read_capabilities
from quantd.daemon.infill import InfillText, InfillWriter, SourceFile
from quantd.daemon.infill_formats import FORMATS, infill_writer
from quantd.daemon.tokenizer import Tokenizer

FILES = (SourceFile("a.py", "one = 1"), SourceFile("b.py", "two = 2"))
NEW = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
OLD = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"]
DEEPSEEK = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
SEED = ["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"]
GLM = ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|user|>", "<|assistant|>"]
QWEN = list(QWEN_INFILL)


def with_tokens(
    names: Sequence[str], core: tokenizers.Tokenizer | None = None, special: bool = True
) -> Tokenizer:
    core = core or chat_tokenizer()
    core.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return Tokenizer(core, {}, None, [2])


def writer_of(tokenizer: Tokenizer) -> InfillWriter:
    writer = infill_writer(tokenizer)
    assert writer is not None
    return writer


TOKENIZER = with_tokens(QWEN)
CONTROLS = {TOKENIZER.token_id(name) for name in QWEN}


# As the model cards and papers print them, with the files of FILES.
@pytest.mark.parametrize(
    ("family", "tokens", "alone", "among"),
    [
        (
            "Qwen coder",
            QWEN,
            "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>{M}",
            "<|repo_name|>repository\n<|file_sep|>a.py\none = 1\n<|file_sep|>b.py\ntwo = 2\n"
            "<|file_sep|>file\n<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>{M}",
        ),
        (
            "Granite 4",
            [*NEW, "<|filename|>", "<|reponame|>"],
            "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>{M}",
            "<|reponame|>repository<|filename|>a.py\none = 1<|filename|>b.py\ntwo = 2<|filename|>file\n"
            "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>{M}",
        ),
        (
            "CodeGemma",
            [*NEW[:3], "<|file_separator|>"],
            "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>{M}",
            "one = 1<|file_separator|>two = 2<|file_separator|>"
            "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>{M}",
        ),
        (
            "StarCoder2",
            [*OLD, "<file_sep>", "<repo_name>", "<reponame>", "<filename>"],
            "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>{M}",
            "<repo_name>repository<file_sep>a.py\none = 1<file_sep>b.py\ntwo = 2<file_sep>"
            "<fim_prefix>file\n{P}<fim_suffix>{S}<fim_middle>{M}",
        ),
        (
            "StarCoder, Granite and StableCode",
            [*OLD, "<reponame>", "<filename>"],
            "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>{M}",
            "<reponame>repository<filename>a.py\none = 1<filename>b.py\ntwo = 2<filename>file\n"
            "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>{M}",
        ),
        (
            "DeepSeek Coder",
            DEEPSEEK,
            "<｜fim▁begin｜>{P}<｜fim▁hole｜>{S}<｜fim▁end｜>{M}",
            "<｜fim▁begin｜>#a.py\none = 1\n#b.py\ntwo = 2\n#file\n{P}<｜fim▁hole｜>{S}<｜fim▁end｜>{M}",
        ),
        (
            "Codestral",
            ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"],
            "[SUFFIX]{S}[PREFIX]{P}{M}",
            "[SUFFIX]{S}[PREFIX]+++++ a.py\none = 1\n\n+++++ b.py\ntwo = 2\n\n+++++ file\n{P}{M}",
        ),
        (
            "Seed-Coder",
            SEED,
            "<[fim-suffix]>{S}<[fim-prefix]>{P}<[fim-middle]>{M}",
            "<[fim-suffix]>{S}<[fim-prefix]>a.py\none = 1\nb.py\ntwo = 2\n{P}<[fim-middle]>{M}",
        ),
        (
            "GLM",
            [*GLM, "<think>"],
            "<|code_prefix|>{P}<|code_suffix|>{S}<|code_middle|>{M}",
            "a.py\none = 1\nb.py\ntwo = 2\n<|code_prefix|>{P}<|code_suffix|>{S}<|code_middle|>{M}",
        ),
        (
            "CodeGeeX",
            GLM,
            "<|user|>\n###PATH:file\n###LANGUAGE:\n###MODE:BLOCK\n"
            "<|code_suffix|>{S}<|code_prefix|>{P}<|code_middle|><|assistant|>\n{M}",
            "<|user|>\n###REFERENCE:\n###PATH:a.py\none = 1\n###REFERENCE:\n###PATH:b.py\ntwo = 2\n"
            "###PATH:file\n###LANGUAGE:\n###MODE:BLOCK\n"
            "<|code_suffix|>{S}<|code_prefix|>{P}<|code_middle|><|assistant|>\n{M}",
        ),
        ("FIM tokens", NEW[:3], "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>{M}", None),
        ("FIM tokens", OLD[:3], "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>{M}", None),
    ],
)
def test_layouts(family: str, tokens: list[str], alone: str, among: str | None) -> None:
    tokenizer = with_tokens(tokens)
    writer = writer_of(tokenizer)
    assert writer.format.family == family
    assert {tokenizer.token_id(name) for name in writer.format.controls} <= set(writer.stop_ids)
    for prefix, suffix, middle in (("def f(a):\n    ", "\n\nf(1)  # é\n", "return"), ("", "", "")):
        text = InfillText(prefix=prefix, suffix=suffix, middle=middle)
        names = {"P": prefix, "S": suffix, "M": middle}
        assert writer.prompt(text).ids == tokenizer.encode(alone.format(**names))
        if among is not None:
            assert writer.prompt(replace(text, files=FILES)).ids == tokenizer.encode(among.format(**names))


def code_llama_tokenizer() -> tokenizers.Tokenizer:
    """Its control tokens over a small vocabulary of its kind."""
    core = byte_fallback_tokenizer()
    marks = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    core.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return core


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [("the ", " the"), ("  a\n", "a\n"), ("h", "he"), ("é漢!", "'s."), ("a", " "), (" ", "\n")],
)
def test_code_llama_spaces(prefix: str, suffix: str) -> None:
    core = code_llama_tokenizer()
    state = json.loads(core.to_str())
    merges = [tuple(merge) for merge in state["model"]["merges"]]
    # It puts the prefix's space itself; add_prefix_space would put one before the suffix too.
    oracle = CodeLlamaTokenizer(vocab=state["model"]["vocab"], merges=merges, add_prefix_space=False)
    ids = oracle(prefix, suffix=suffix)["input_ids"]
    marks = ["<s>", "▁<PRE>", "▁<SUF>", "▁<MID>"]
    assert [token for token in oracle.convert_ids_to_tokens(ids) if token in marks] == marks
    tokenizer = Tokenizer(core, {"bos_token": "<s>", "add_bos_token": True}, None, [2])
    writer = writer_of(tokenizer)
    made = writer.prompt(InfillText(prefix=prefix, suffix=suffix)).ids
    named = [core.id_to_token(token_id) for token_id in made]
    assert named == oracle.convert_ids_to_tokens(ids)


def test_code_llama_puts_no_space_before_nothing() -> None:
    """As sentencepiece, which Meta's code calls for both texts."""
    core = code_llama_tokenizer()
    made = writer_of(Tokenizer(core, {}, None, [2])).prompt(InfillText(prefix="", suffix="")).ids
    assert [core.id_to_token(token_id) for token_id in made] == ["▁<PRE>", "▁<SUF>", "▁<MID>"]


def test_answers_end_where_the_family_ends_them() -> None:
    tokenizer = with_tokens(QWEN)
    ends = {tokenizer.token_id(name) for name in (*QWEN, "<|im_start|>", "<|im_end|>")}
    assert set(writer_of(tokenizer).stop_ids) == ends


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("names", [QWEN, DEEPSEEK, SEED, ["[PREFIX]", "[SUFFIX]"], [*OLD, "<file_sep>"]])
def test_what_users_spell_is_text(names: list[str], special: bool) -> None:
    tokenizer = with_tokens(names, special=special)
    writer = writer_of(tokenizer)
    controls = {tokenizer.token_id(name) for name in names}
    spelled = "".join(names) + "<|fim_<|fim_prefix|>prefix|> <|im_end|></s>"
    for text in (spelled, f"x = '{names[0]}'  {names[1]}\n", names[0], names[0] * 3):
        plain = InfillText(prefix="x", suffix="y", middle="z", files=[SourceFile("f", "t")])
        asked = InfillText(prefix=text, suffix=text, middle=text, files=[SourceFile(text, text)])
        made, pattern = writer.prompt(asked).ids, writer.prompt(plain).ids
        kept = controls | {512, 513, 0, 1, 2}
        assert [i for i in made if i in kept] == [i for i in pattern if i in kept]
        encoded = tokenizer.encode_text(text, controls=controls)
        assert tokenizer.decode(encoded, special=True) == text


@given(st.text(alphabet=st.sampled_from("<|fim_pre x>|｜[]"), max_size=60))
def test_no_text_makes_a_control_token(text: str) -> None:
    ids = TOKENIZER.encode_text(text)
    assert CONTROLS.isdisjoint(ids)
    assert TOKENIZER.decode(ids, special=True) == text


def test_text_without_controls_is_encoded_as_ever() -> None:
    tokenizer = with_tokens(QWEN)
    for text in ("", "def f():\n    return 1\n", "é漢🧵", "a <b> c"):
        assert tokenizer.encode_text(text) == tokenizer.encode(text)


def test_the_oldest_files_make_room() -> None:
    tokenizer = with_tokens(QWEN)
    writer = writer_of(tokenizer)
    files = [SourceFile(f"f{number}.py", f"x{number} = {number}\n" * 8) for number in range(12)]
    text = InfillText(prefix="p" * 40, suffix="s" * 40, files=files)
    whole = writer.prompt(text)
    assert writer.fitted(text, len(whole.ids)) == whole
    for limit in range(len(whole.ids) - 1, 60, -37):
        fitted = writer.fitted(text, limit)
        assert 0 < fitted.num_left_out <= len(files)
        assert len(fitted.ids) <= limit or fitted.num_left_out == len(files)
        rest = replace(text, files=files[fitted.num_left_out :])
        assert fitted.ids == writer.prompt(rest).ids
    tight = writer.fitted(text, 10)
    assert tight.num_left_out == len(files)
    assert tight.ids == writer.prompt(replace(text, files=())).ids


def test_typing_seldom_changes_which_files_have_room() -> None:
    writer = writer_of(with_tokens(QWEN))
    files = [SourceFile(f"f{number}.py", f"x{number} = {number}\n" * 8) for number in range(12)]
    left_out = {
        writer.fitted(InfillText(prefix="p " * typed, suffix="", files=files), 300).num_left_out
        for typed in range(30)
    }
    assert len(left_out) <= 2


def test_capabilities(tmp_path: Path) -> None:
    chat = write_model(tmp_path / "chat", CHATML)
    assert read_capabilities(chat) == Capabilities(chat=True, tools=True, thinking=False, infill=None)
    bare = write_model(tmp_path / "bare", None)
    assert read_capabilities(bare) == Capabilities(chat=False, tools=False, thinking=False, infill=None)
    template = "{% if tools %}{{ tools }}{% endif %}{% if enable_thinking %}<think>{% endif %}" + CHATML
    able = write_model(tmp_path / "able", template, QWEN_INFILL)
    expected = Capabilities(chat=True, tools=True, thinking=True, infill="Qwen coder")
    assert read_capabilities(able) == expected
    assert capabilities_of(Tokenizer.load(able)) == expected


def test_each_family_is_told_from_the_others() -> None:
    for format in FORMATS:
        tokenizer = with_tokens([*format.controls, *format.marks])
        assert writer_of(tokenizer).format is format
