"""Answers that end with their lines, wherever the stream was cut."""

from __future__ import annotations

import pytest

from quantd.daemon.line_rules import LineRules


def cut(rules: LineRules, parts: list[str]) -> tuple[str, bool]:
    limit, text = rules.limit(), ""
    for part in parts:
        free, ends = limit.feed(part)
        text += free
        if ends:
            return text, True
    return text, False


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("return a\n    b = 1\n", "c"),
        ("return a\n  ", "c"),
        ("first line goes on", ""),
        ("a\n\n    blank lines pass\n \n    b", ""),
        ("a\n\t\t\t\ttabs count as one each", ""),
        ("", ""),
    ],
)
def test_a_line_indented_too_little_ends_the_answer(text: str, rest: str) -> None:
    rules = LineRules(min_indent=4)
    whole = text + rest
    expected = (text, bool(rest))
    assert cut(rules, [whole]) == expected
    assert cut(rules, list(whole)) == expected
    for place in range(len(whole)):
        assert cut(rules, [whole[:place], whole[place:]]) == expected


def test_time_ends_an_answer_once_a_line_is_done() -> None:
    now = [0.0]
    limit = LineRules(max_seconds=1.0).limit(lambda: now[0])
    assert limit.feed("") == ("", False)
    now[0] = 50.0
    assert limit.feed("a") == ("a", False)
    now[0] = 52.0
    assert limit.feed("b") == ("b", False)
    assert limit.feed("\nc") == ("\nc", True)


def test_no_rules_let_all_go() -> None:
    assert cut(LineRules(), ["a\nb", "\nc"]) == ("a\nb\nc", False)
