"""What is read of a model folder's text side."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from fake_models import CHATML, byte_fallback_tokenizer, write_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.tokenizer_file import MAX_BYTES
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError


def test_end_ids_are_the_union_of_all_sources(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": 6}}))
    assert Tokenizer.load(folder).end_ids == {2, 5, 6, 7, 9, 513}


def test_a_turn_end_counts_only_if_the_template_uses_it(tmp_path: Path) -> None:
    assert Tokenizer.load(write_model(tmp_path, "{{ messages }}")).end_ids == {2}
    assert Tokenizer.load(write_model(tmp_path, None)).end_ids == {2}


@pytest.mark.parametrize(
    ("config", "processed", "text", "starts_with_bos"),
    [
        ({"add_bos_token": True}, False, "hi", True),
        ({"add_bos_token": False}, True, "hi", False),
        ({}, True, "hi", True),
        ({}, False, "hi", False),
        ({"add_bos_token": True}, False, "<s>hi", True),
    ],
)
def test_raw_prompts_get_the_tokenizers_own_bos_once(
    tmp_path: Path, config: dict[str, object], processed: bool, text: str, starts_with_bos: bool
) -> None:
    core = byte_fallback_tokenizer()
    if processed:
        core.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    core.save(str(tmp_path / "tokenizer.json"))
    config |= {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = Tokenizer.load(tmp_path).encode(text, raw=True)
    assert ids.count(1) == starts_with_bos and (ids[0] == 1) == starts_with_bos and 2 not in ids


@pytest.mark.parametrize(
    ("frame", "config", "before", "behind"),
    [
        ("<s> $A </s>", {}, [1], [2]),
        ("$A </s>", {}, [], [2]),
        # As Qwen3-Embedding: what ends a text does not end an answer.
        ("$A <unk>", {}, [], [0]),
        ("$A", {}, [], []),
        ("<s> $A", {"add_eos_token": True}, [1], [2]),
        ("$A", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ("<s> $A </s>", {"add_bos_token": False, "add_eos_token": False}, [], []),
    ],
)
def test_whole_texts_get_what_the_tokenizer_puts_around_them_once(
    tmp_path: Path, frame: str, config: dict[str, bool], before: list[int], behind: list[int]
) -> None:
    core = byte_fallback_tokenizer()
    specials = [(name, core.token_to_id(name)) for name in ("<unk>", "<s>", "</s>")]
    core.post_processor = TemplateProcessing(single=frame, special_tokens=specials)
    core.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = Tokenizer.load(tmp_path)
    bare = core.encode("the ant", add_special_tokens=False).ids
    whole = [*before, *bare, *behind]
    assert tokenizer.encode_framed("the ant") == whole
    assert tokenizer.encode_framed("the ant", len(whole)) == whole
    assert tokenizer.encode_framed("the ant", len(whole) - 2) == [*before, *bare[:-2], *behind]
    assert tokenizer.encode_framed("") == [*before, *behind]
    ended = "the ant" + "".join(core.id_to_token(token) for token in behind)
    assert tokenizer.encode_framed(ended) == whole
    if not config:
        assert AutoTokenizer.from_pretrained(tmp_path)("the ant")["input_ids"] == whole


def test_rendered_text_gets_no_special_tokens_again(tmp_path: Path) -> None:
    template = "{{ bos_token }}" + CHATML
    folder = write_model(tmp_path, template, add_bos_token=True)
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "user", "content": "Say hi"}]
    assert tokenizer.template is not None
    ids = tokenizer.encode(tokenizer.template.render(messages))
    oracle = AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == expected
    assert ids.count(1) == 1


@pytest.mark.parametrize(
    "chat_template",
    [CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]],
)
def test_templates_of_the_configuration(tmp_path: Path, chat_template: object) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, None, chat_template=chat_template))
    assert tokenizer.template is not None and tokenizer.template.source == CHATML


def test_template_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path, None, chat_template="config")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "default.jinja").write_text("extra")
    assert Tokenizer.load(folder).template.source == "extra"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).template.source == "file"


def test_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000], ids=["cut", "list", "bytes", "deep"]
)
def test_damaged_json_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (write_model(tmp_path) / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


def changed_tokenizer(folder: Path, **parts: object) -> Path:
    file = write_model(folder) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


def in_a_row(kind: str, step: dict[str, object], number: int) -> dict[str, object]:
    return {"type": "Sequence", kind: [step] * number}


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
REMOVE = {"type": "Replace", "pattern": {"String": "zz"}, "content": ""}
INSERT = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 300}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": in_a_row("normalizers", DOUBLE, 60)},
        {"normalizer": in_a_row("normalizers", {"type": "ByteLevel"}, 60)},
        {"normalizer": in_a_row("normalizers", in_a_row("normalizers", DOUBLE, 5), 5)},
        {"normalizer": INSERT},
        {"normalizer": {"type": "Sequence", "normalizers": [REMOVE, *[DOUBLE] * 60]}},
        {"decoder": in_a_row("decoders", DOUBLE, 60)},
    ],
    ids=["doubling", "bytes", "nested", "inserting", "removing too", "decoder"],
)
def test_a_tokenizer_that_makes_texts_huge_is_refused(tmp_path: Path, parts: dict[str, object]) -> None:
    """Sixty steps would make one character an exabyte, in the daemon's own memory."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its steps could make a text .* as long"):
        Tokenizer.load(changed_tokenizer(tmp_path, **parts))


def test_a_text_that_a_tokenizer_cannot_cut_is_refused(tmp_path: Path) -> None:
    """The library panics once an expression has taken too many tries, with what is no Exception."""
    split = {"type": "Split", "pattern": {"Regex": "(a|a)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.load(changed_tokenizer(tmp_path, pre_tokenizer=split))
    with pytest.raises(RequestError, match=r"tokenizer fails on this text: .*retry-limit"):
        tokenizer.encode("a" * 60 + "b")
    with pytest.raises(RequestError, match=r"tokenizer fails on this text: "):
        tokenizer.encode("half a surrogate pair, as a template may write one: \ud800")
    assert tokenizer.decode(tokenizer.encode("b")) == "b"


def test_a_file_that_no_tokenizer_needs_is_refused(tmp_path: Path) -> None:
    with (write_model(tmp_path) / "tokenizer.json").open("ab") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match="larger than"):
        Tokenizer.load(tmp_path)


def test_odd_templates(tmp_path: Path) -> None:
    for odd in (5, [], [1], [{"name": ["x"]}], [{"template": 5}]):
        assert Tokenizer.load(write_model(tmp_path, None, chat_template=odd)).template is None
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Tokenizer.load(tmp_path)


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "listed tools"}, {"name": "default", "template": "listed"}]
    folder = write_model(tmp_path, None, chat_template=listed)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.template and tokenizer.template.source == "listed"
    assert tokenizer.tool_template and tokenizer.tool_template.source == "listed tools"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools in a file")
    (folder / "chat_template.jinja").write_text("a file")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.template and tokenizer.template.source == "a file"
    assert tokenizer.tool_template and tokenizer.tool_template.source == "tools in a file"
    assert Tokenizer.load(write_model(tmp_path / "other")).tool_template is None


def test_an_end_id_that_is_none_is_left_out(tmp_path: Path) -> None:
    folder = write_model(tmp_path, None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, "x", True, 7]}))
    assert Tokenizer.load(folder).end_ids == {2, 7}


def test_other_threads_go_on_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path))
    over, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = ticks
    ids = tokenizer.encode("one two three " * 100_000)
    during = ticks - before
    over.set()
    ticker.join()
    assert during > 10 and tokenizer.decode(ids[:20]).startswith("one two three")
