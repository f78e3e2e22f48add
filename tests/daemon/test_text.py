"""Incremental text equals text decoded at once (cases c01 and c35), and stop strings."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from fake_models import byte_fallback_tokenizer, chat_tokenizer, metaspace_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from quantd.daemon.text import IncrementalDetokenizer, StopStrings, decoder_steps
from quantd.daemon.tokenizer import Tokenizer
from quantd.quant.errors import UnsupportedModelError

LITERAL = "naïve — 漢字 अना 🧵 👩‍💻 🇳🇴 end"
TOKENIZERS = {
    "byte-level": chat_tokenizer,
    "byte-fallback": byte_fallback_tokenizer,
    "byte-fallback, kept head": lambda: byte_fallback_tokenizer(strips=False),
    "metaspace": metaspace_tokenizer,
}


def load(core: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(core, {}, None, ())


def deltas(detokenizer: IncrementalDetokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


def check_random_lists(tokenizer: Tokenizer, vocab_size: int, count: int) -> None:
    draw = random.Random(35)
    for _ in range(count):
        ids = [draw.randrange(vocab_size) for _ in range(draw.randrange(1, 24))]
        parts = deltas(tokenizer.detokenizer(at_start=True), ids)
        assert "".join(parts) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_deltas_join_to_one_decode(make) -> None:
    core = make()
    check_random_lists(load(core), core.get_vocab_size(), 10_000)


def test_deltas_join_to_one_decode_on_a_real_tokenizer(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    check_random_lists(tokenizer, 49152, 10_000)
    assert "".join(deltas(tokenizer.detokenizer(), tokenizer.encode(LITERAL))) == LITERAL


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_unknown_ids_have_no_text(make) -> None:
    assert load(make()).detokenizer().feed(10**6) == ""


def test_characters_are_never_split() -> None:
    tokenizer = load(chat_tokenizer())
    ids = tokenizer.encode(LITERAL)
    for cut in range(1, len(ids) + 1):
        *parts, rest = deltas(tokenizer.detokenizer(), ids[:cut])
        assert "\ufffd" not in "".join(parts)
        assert rest in ("", "\ufffd")
    assert "".join([*parts, rest]) == LITERAL
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == LITERAL


def test_a_byte_run_waits_for_its_end() -> None:
    tokenizer = load(byte_fallback_tokenizer())
    thread = [3 + byte for byte in "🧵".encode()]
    full_stop = tokenizer.encode(".")[-1]
    assert deltas(tokenizer.detokenizer(), [*thread, full_stop]) == ["", "", "", "", "🧵.", ""]
    assert deltas(tokenizer.detokenizer(), thread[:2])[-1] == "\ufffd\ufffd"
    assert b"".join(map(tokenizer.token_bytes, thread)) == "🧵".encode()


def test_a_continuation_keeps_its_leading_space() -> None:
    for core in (byte_fallback_tokenizer(), metaspace_tokenizer()):
        tokenizer = load(core)
        first = core.token_to_id("▁é")
        assert "".join(deltas(tokenizer.detokenizer(at_start=True), [first])) == "é"
        assert "".join(deltas(tokenizer.detokenizer(), [first])) == " é"
        assert tokenizer.token_bytes(first) == " é".encode()


def test_unknown_decoders_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        decoder_steps({"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(UnsupportedModelError, match="no decoder"):
        decoder_steps(None)


def cut(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, str | None]:
    used = StopStrings(stops)
    used.feed("ab")
    filter_ = used.restarted()
    text = ""
    for part in parts:
        free, met = filter_.feed(part)
        text += free
        if met is not None:
            return text, met
    return text + filter_.flush(), None


def first_completed(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The specification: read character by character until some stop string is there."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], max(met, key=len)
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=12),
)
def test_stop_strings_do_not_depend_on_the_cuts(stops: list[str], parts: list[str]) -> None:
    assert cut(stops, parts) == first_completed(stops, "".join(parts))


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    filter_ = StopStrings(["\n\nUser:", "END"])
    assert filter_.feed("a\n\nUs") == ("a", None)
    assert filter_.feed("e the EN") == ("\n\nUse the ", None)
    assert filter_.feed("Dless") == ("", "END")


def test_case_literal_matches_ours() -> None:
    body = json.loads((Path(__file__).parents[1] / "data/cases/c01.json").read_text())["body"]
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["answer"]["enum"] == [LITERAL]
