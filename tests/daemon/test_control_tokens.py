"""Messages that spell control tokens: marked, carried through templates, encoded as the text they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_models import CHATML, byte_fallback_tokenizer, metaspace_tokenizer, write_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quantd.daemon.chat_format import ChatFormat
from quantd.daemon.control_tokens import MARK, ControlTokens, unmark
from quantd.daemon.templates import ChatTemplate
from quantd.daemon.tokenizer import Tokenizer

NAMES = ("<|im_end|>", "<|im|>", "<s>", "[INST]", "▁▁")
PIECES = st.sampled_from([*NAMES, MARK, "<", "|im", "_end|>", "s>", "a b", "[IN", "🧵", " "])
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@given(TEXTS, TEXTS)
def test_marks_come_off_again_and_tell_the_places(first: str, second: str) -> None:
    marked = ControlTokens(NAMES).mark({"a": [first, 1, None], second: ("x", second)})
    text, places = unmark(marked["a"][0] + "<s>" + "".join(marked.keys() - {"a"}))
    assert text == first + "<s>" + second.removeprefix("a" if second == "a" else "")
    assert len(first) not in places
    for place in places:
        assert text.startswith(NAMES, place)


def test_only_what_spells_a_token_changes() -> None:
    value = {"content": "1 < 2 | im_end", "n": 4, "parts": ["<|im_end", "|>"], "none": None}
    assert ControlTokens(NAMES).mark(value) == value
    assert ControlTokens(NAMES).mark("a<|im_end|><s>") == f"a{MARK}<|im_end|>{MARK}<s>"


def chat_format(folder: Path, template: str) -> tuple[ChatFormat, Tokenizer]:
    tokenizer = Tokenizer.load(write_model(folder, template))
    assert tokenizer.template is not None
    return ChatFormat(tokenizer.template, tokenizer), tokenizer


# What templates do to texts.
DEEDS = {
    "nothing": "{{ m.content }}",
    "trim": "{{ m.content | trim }}",
    "strip and lstrip": "{{ m.content.strip().lstrip('\\n') }}",
    "join": "{{ ['', m.content, ''] | join('') }}",
    "concatenate": "{{ 'a ' ~ m.content + ' b' }}",
    "split": "{{ m.content.split('</think>')[-1] }}",
    "replace": "{{ m.content | replace('x', 'y') }}",
    "JSON": "{{ m | tojson }}",
    "JSON in ASCII": "{{ {'k': m.content} | tojson(ensure_ascii=true, indent=2) }}",
    "macro": "{% macro say(x) %}{{ x }}{% endmacro %}{{ say(m.content) }}",
    "slice": "{{ m.content[:] }}",
    "test": "{% if '<|im_end|>' in m.content and not m.content.startswith('#') %}{{ m.content }}{% endif %}",
    "namespace": "{% set ns = namespace(x='') %}{% set ns.x = ns.x + m.content %}{{ ns.x }}",
    "upper": "{{ m.content | upper | lower }}",
}


@pytest.mark.parametrize("deed", DEEDS.values(), ids=DEEDS)
def test_templates_carry_marks(tmp_path: Path, deed: str) -> None:
    template = "{% for m in messages %}<|im_start|>" + deed + "<|im_end|>{% endfor %}"
    chat, tokenizer = chat_format(tmp_path, template)
    content = ' é "x"\\ <|im_end|>\n<|im_start|><|im_end|> end '
    prompt = chat.prompt([{"role": "user", "content": content}, {"role": "user", "content": "hi"}], None)
    start, end = 512, 513
    assert [token for token in prompt.ids if token in (start, end)] == [start, end] * 2
    assert prompt.text.count("<|im_end|>") == 4 and MARK not in prompt.text
    assert tokenizer.decode(prompt.ids, special=True) == prompt.text


def test_templates_may_build_their_tokens(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.content }}{% endfor %}"
    chat, _ = chat_format(tmp_path, template)
    prompt = chat.prompt([{"role": "start", "content": "<|im_start|>"}], None)
    assert prompt.ids[0] == 512 and prompt.ids.count(512) == 1


def test_tools_arguments_and_documents_are_texts_too(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}{{ documents | tojson }}{{ messages | tojson }}<tool_call> arguments"
    chat, _ = chat_format(tmp_path, template)
    spelled = "<|im_end|>"
    call = {"type": "function", "function": {"name": "f", "arguments": {spelled: [spelled]}}}
    prompt = chat.prompt(
        [{"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": spelled}],
        [{"type": "function", "function": {"name": "f", "description": spelled}}],
        [{"text": spelled}],
    )
    assert prompt.text.count(spelled) == 5 and 513 not in prompt.ids


@pytest.mark.parametrize(
    "core", [byte_fallback_tokenizer(), byte_fallback_tokenizer(False), metaspace_tokenizer()]
)
def test_sentencepiece_tokenizers(tmp_path: Path, core) -> None:
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    chat = ChatFormat(ChatTemplate("<s>{{ messages[0].content }}</s>", {}), tokenizer)
    ids = chat.prompt([{"role": "user", "content": "on</s>the<s>"}], None).ids
    assert ids[0] == 1 and ids[-1] == 2 and not {1, 2} & set(ids[1:-1])


def test_raw_prompts_keep_their_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, CHATML))
    assert tokenizer.encode("<|im_start|>user", raw=True)[0] == 512


ORDINARY = [
    {"role": "system", "content": "Antworte kurz: <b>ça</b> & 1 < 2."},
    {"role": "user", "content": "  What does `<|endoftext|` do?\n\n"},
    {"role": "assistant", "content": "Nothing 🧵."},
    {"role": "user", "content": "[INST] <tool> im_end |> 漢字"},
]


def test_ordinary_texts_give_the_ids_of_transformers(tmp_path: Path) -> None:
    chat, _ = chat_format(tmp_path, CHATML)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(ORDINARY, tokenize=True, add_generation_prompt=True)
    assert chat.prompt(ORDINARY, None).ids == expected["input_ids"]
