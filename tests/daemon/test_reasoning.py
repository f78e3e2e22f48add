"""Reasoning sections: found by the template's tags, split off at any cut, over where the prompt says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantd.daemon.reasoning import REASONING_TAGS, ReasoningTags, Start, reasoning_tags
from quantd.daemon.scanner import ReadOutput, Scanner, Steps, read_content

THINK = ReasoningTags("<think>", "</think>")


def read(tags: ReasoningTags, start: Start, parts: Sequence[str]) -> tuple[str, str]:
    """Reasoning and content of a text in parts."""

    def reader(scanner: Scanner) -> Steps[None]:
        yield from tags.read(scanner, start)
        yield from read_content(scanner)

    parser = ReadOutput(reader, frozenset())
    pieces = list(itertools.chain(*map(parser.feed, parts), parser.flush()))
    assert all(bool(piece.text) != bool(piece.reasoning) for piece in pieces)
    return "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces)


def same_at_every_cut(tags: ReasoningTags, start: Start, text: str) -> tuple[str, str]:
    whole = read(tags, start, [text])
    assert read(tags, start, list(text)) == whole
    for cut in range(len(text)):
        assert read(tags, start, [text[:cut], text[cut:]]) == whole, text[:cut]
    return whole


@pytest.mark.parametrize(
    ("start", "text", "expected"),
    [
        ("possible", "<think>\nSo.\n</think>\n\nYes.", ("So.", "Yes.")),
        ("possible", "\n <think>So.</think>Yes. ", ("So.", "Yes. ")),
        ("possible", "<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        ("possible", " Yes.\n", ("", " Yes.\n")),
        ("possible", "Yes, <think>no</think>.", ("", "Yes, <think>no</think>.")),
        ("possible", "<thin", ("", "<thin")),
        ("possible", "", ("", "")),
        ("inside", "So.\n</think>\n\nYes.", ("So.", "Yes.")),
        ("inside", "\nThe budget ends here", ("The budget ends here", "")),
        ("inside", "and here </thin", ("and here </thin", "")),
        ("inside", "</think>Yes.", ("", "Yes.")),
        ("inside", "A `</think>` ends it.\n</think>Yes.", ("A `</think>` ends it.", "Yes.")),
        ("inside", "'</think>' or \"</think>\"!</think>Yes.", ("'</think>' or \"</think>\"!", "Yes.")),
        ("inside", "It said `so`</think>Yes.", ("It said `so`", "Yes.")),
        ("inside", 'It said "so"</think>', ('It said "so"', "")),
        ("over", "Yes.", ("", "Yes.")),
        ("over", "<think>once more</think>Yes.", ("once more", "Yes.")),
    ],
)
def test_sections(start: Start, text: str, expected: tuple[str, str]) -> None:
    assert same_at_every_cut(THINK, start, text) == expected


def test_an_answer_in_tags_of_its_own() -> None:
    granite = next(tags for tags in REASONING_TAGS if tags.answer)
    text = "<think>So.</think><response>Yes.\n</response>"
    assert same_at_every_cut(granite, "possible", text) == ("So.", "Yes.")
    assert same_at_every_cut(granite, "possible", text[:-4]) == ("So.", "Yes.\n</respo")
    assert same_at_every_cut(granite, "possible", "Yes: <response>") == ("", "Yes: <response>")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "`", '"', "\n", " ", "a", "é"])),
    st.sampled_from(["inside", "possible"]),
    st.data(),
)
def test_any_text_at_any_cuts(parts: list[str], start: Start, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(THINK, start, pieces) == read(THINK, start, [text])


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n", "possible"),
        ("<|im_start|>assistant\n<think>\n", "inside"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "over"),
        ("user: What is <think>?\nassistant:", "possible"),
    ],
)
def test_the_prompts_end_tells_where_an_answer_begins(prompt: str, start: Start) -> None:
    assert THINK.start(prompt) == start


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("{{ '<think>\n' }}", "<think>"),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", "[THINK]"),
        ("{% set think_begin_token = '<seed:think>' %}", "<seed:think>"),
        ("after 'Here is my thought process:' and 'Here is my response:'", "Here is my thought process:"),
    ],
)
def test_tags_are_those_that_a_template_names(template: str, opening: str) -> None:
    tags = reasoning_tags(template)
    assert tags is not None and tags.opening == opening and tags.answer is None
    assert reasoning_tags("{{ messages }}") is None
