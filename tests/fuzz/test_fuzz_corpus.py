"""The corpus of the fuzz targets, replayed: what crashed once, and what reaches far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_targets import CORPUS, FORMATS, TARGETS, refuses, runner
from hypothesis import given, settings
from hypothesis import strategies as st

FILES = sorted(CORPUS.glob("*/*"))
CASES = Path(__file__).parents[1] / "data" / "cases"


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    runner().close()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_corpus_of(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    refused = [refuses(TARGETS[name], file.read_bytes()) for file in files]
    assert not all(refused), "some of it is sound, so that what lies behind the refusals is reached"


def test_every_file_has_a_target() -> None:
    assert {file.parent.name for file in FILES} == set(TARGETS)
    assert max(file.stat().st_size for file in FILES) < 20_000


@pytest.mark.parametrize("name", ["openai", "anthropic", "responses", "ollama", "llama_server"])
def test_no_body_of_the_handed_cases_crashes_another_dialect(name: str) -> None:
    for file in sorted(CASES.glob("*.json")):
        body = json.dumps(json.loads(file.read_text())["body"]).encode()
        for kind in range(8):
            refuses(TARGETS[name], bytes([kind]) + body)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(set(TARGETS) - {"template", "tokenizer_json"})), st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(name: str, data: bytes) -> None:
    refuses(TARGETS[name], data)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(FORMATS) - 1), st.binary(min_size=3, max_size=3), st.text(max_size=60))
def test_no_cut_changes_what_is_read_of_an_answer(format: int, cuts: bytes, text: str) -> None:
    data = bytes([format]) + cuts + text.encode()
    refuses(TARGETS["tool_calls"], data)
    refuses(TARGETS["reasoning"], data)
