"""Documents of every format: what is not ours stays to the byte, and what was put in can be taken out."""

from __future__ import annotations

import io
import json
import re
import tomllib
from collections.abc import Callable

import json5
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from ruamel.yaml import YAML

from quantd.daemon.connect.document import Document, Item, Path
from quantd.daemon.connect.json_document import JsonDocument
from quantd.daemon.connect.text_documents import ElispBlocks
from quantd.daemon.connect.toml_document import TomlDocument
from quantd.daemon.connect.yaml_document import YamlDocument
from quantd.daemon.errors import ConfigError

OURS = Item("name", "quantd")
Sets = list[tuple[Path, object]]

ZED = """\
// Zed settings
//
{
  "theme": "One Dark", // why
  /* block */ "lsp": {"x": {"y": true}}, // one line
  "env": {
    "A": "1" // last
    // tail of env
  },

  "list": [
    {"name": "other"}, // an item
    // tail of list
  ],
}
"""
CONTINUE = """\
# top
name: My Config   # why
version: 1.0.0
nothing: ~

# models below
models:
  - name: "GPT 4"    # quoted
    roles: [chat, edit]
    opts: {temperature: 0.7}
    # trailing comment in an item

  - name: other
    model: 'x'

# rules
rules:
- uses: a/b
- >-
  folded
  text
last: x"""
TABBY = """\
# top
[model.chat.http] # chat
kind = "openai/chat"
keys = [ 1,
  2, # two
]

[[repositories]]
name = 'a'
"""


def put(make: Callable[[str], Document], text: str, sets: Sets) -> Document:
    document = make(text)
    for path, value in sets:
        document.set(path, value)
    again = make(document.text())
    assert [again.get(path) for path, _ in sets] == [value for _, value in sets]
    return again


def stays(before: str, after: str) -> None:
    """All of the text is there in its order, with others between."""
    found = iter(after)
    missing = next(
        (i for i, letter in enumerate(before) if not letter.isspace() and letter not in found), None
    )
    assert missing is None, before[missing:]


@pytest.mark.parametrize(
    ("make", "text", "sets"),
    [
        (
            JsonDocument,
            ZED,
            [
                (("env", "B"), "2"),
                (("lsp", "z"), {}),
                (("new", "deep"), [1, None]),
                (("list", OURS, "a", "b"), 1.5),
                (("list", OURS, "c"), "é"),
            ],
        ),
        (JsonDocument, '{\n\t"a": 1\n\n\t// end\n}', [(("b",), 2), (("c", "d"), True)]),
        (JsonDocument, '[{"name": "a"}]', [((OURS, "b"), 1), ((OURS, "c"), [])]),
        (JsonDocument, '{"a": {"b": 1 /* x */}} // end', [(("a", "c"), 1), (("d", "e"), 2)]),
        (YamlDocument, CONTINUE, [(("models", OURS, "a"), "1"), (("models", OURS, "b", "c"), ["x"])]),
        (YamlDocument, CONTINUE, [(("z",), "a: b # c"), (("rules2", OURS, "x"), 1)]),
        (YamlDocument, "models:\n- name: a\n", [(("models", OURS, "b"), True)]),
        (YamlDocument, "{a: 1, models: [{name: z, x: 1}]}\n", [(("models", OURS, "b"), 1), (("q", "c"), 1)]),
        (YamlDocument, "# only a comment\n", [(("a", "b"), 1)]),
        (YamlDocument, "---\n# x\n", [(("models", OURS, "b"), 1)]),
        (
            TomlDocument,
            TABBY,
            [(("model", "completion", "http", "kind"), "x"), (("model", "chat", "http", "b"), 1)],
        ),
    ],
)
def test_what_is_there_stays_and_ours_can_go(make, text: str, sets: Sets) -> None:
    document = put(make, text, sets)
    stays(text, document.text())
    for path, _ in reversed(sets):
        document.remove(path)
        assert document.get(path) is UNSET
    assert document.text().rstrip("\n") == text.rstrip("\n")


@pytest.mark.parametrize("make", [JsonDocument, YamlDocument, TomlDocument])
def test_an_empty_file_takes_tables_and_values(make) -> None:
    put(make, "", [(("a",), 1), (("b", "c"), "x"), (("b", "d"), ["y"])])


@pytest.mark.parametrize("make", [JsonDocument, YamlDocument])
def test_an_empty_file_takes_a_list(make) -> None:
    put(make, "\n", [((OURS, "a"), 1), ((OURS, "b", "c"), 2)])


@pytest.mark.parametrize(
    "text",
    ["models: [] # none\n", "models:\nx: 1\n", "models: ~\n", "x: 1\nmodels: {}", "{models: [], x: 1}\n"],
)
def test_yaml_puts_items_where_nothing_is(text: str) -> None:
    document = put(YamlDocument, text.replace("{}", "[]"), [(("models", OURS, "a"), 1)])
    assert YAML(typ="safe", pure=True).load(document.text())["models"] == [{"name": "quantd", "a": 1}]
    assert ("# none" in text) == ("# none" in document.text())


def test_a_value_is_replaced_in_place() -> None:
    document = JsonDocument('{\n  "a": 1, // one\n  "b": [1]\n}\n')
    document.set(("a",), "x")
    document.set(("b",), {"c": 2})
    assert document.text() == '{\n  "a": "x", // one\n  "b": {\n    "c": 2\n  }\n}\n'
    yaml = YamlDocument("a: 1 # one\nb:\n  - 1\n  # c\n")
    yaml.set(("a",), 'é: "')
    yaml.set(("b",), [2])
    assert YAML(typ="safe", pure=True).load(yaml.text()) == {"a": 'é: "', "b": [2]}
    assert "# one" in yaml.text() and "# c" in yaml.text()
    toml = TomlDocument("a = 1 # one\n")
    toml.set(("a",), "x")
    assert toml.text() == 'a = "x" # one\n'


def test_a_key_in_the_middle_goes_with_its_line() -> None:
    yaml = YamlDocument("models:\n- b: 1 # first\n  name: quantd\n  c: 2\n")
    yaml.remove(("models", OURS, "c"))
    assert yaml.text() == "models:\n- b: 1 # first\n  name: quantd\n"
    flow = YamlDocument("b: {x: 1, y: 2, z: 3}\n")
    flow.remove(("b", "y"))
    assert flow.text() == "b: {x: 1, z: 3}\n"
    jsonc = JsonDocument('{\n  "a": 1, // a\n  "b": 2, // b\n  "c": 3 // c\n}\n')
    jsonc.remove(("b",))
    assert json5.loads(jsonc.text()) == {"a": 1, "c": 3}
    assert "// a" in jsonc.text() and "// c" in jsonc.text()


@pytest.mark.parametrize(
    ("make", "text", "line"),
    [
        (JsonDocument, '{\n "a": 1\n "b": 2}\n', 3),
        (JsonDocument, '{\n"a":\n', 2),
        (JsonDocument, "{}}\n", 1),
        (YamlDocument, "a: 1\n b: [\n", 2),
        (YamlDocument, "a: 1\na: 2\n", 2),
        (YamlDocument, "a: 1\n---\nb: 2\n", 2),
        (TomlDocument, "a = 1\nb = \n", 2),
    ],
)
def test_a_broken_file_is_refused_with_its_line(make, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^line {line}: not valid (JSON|YAML|TOML)"):
        make(text)


@pytest.mark.parametrize(
    ("make", "text", "path", "message"),
    [
        (JsonDocument, '{"a": 1}', ("a", "b"), "a does not hold settings by name"),
        (JsonDocument, "[]", ("a",), "the file does not hold settings by name"),
        (YamlDocument, "a: {b: 1}", ("a", OURS, "c"), "a is not a list"),
        (TomlDocument, "a = 1", ("a", "b", "c"), "a does not hold settings by name"),
    ],
)
def test_a_path_that_cannot_lead_there_is_refused_by_name(make, text: str, path: Path, message: str) -> None:
    for act in (lambda document: document.set(path, 1), lambda document: document.get(path)):
        with pytest.raises(ConfigError, match=message):
            act(make(text))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a: &r [1]\nm:\n  - &q {name: z}\n  - *q\n", ("m", OURS, "b")),
        ("a: &r {name: z}\nm:\n- *r\n", ("m", OURS, "b")),
        ("a: &r 1\nm: *r\n", ("m",)),
        ("a: &r {x: 1}\nm: *r\n", ("m", "b", "c")),
        ("a: &r {x: 1}\nm: *r\n", ("m", "x")),
    ],
)
def test_yaml_does_not_write_where_an_alias_is(text: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line \d: an alias"):
        YamlDocument(text).set(path, 2)


def test_yaml_writes_beside_aliases() -> None:
    text = "m:\n- name: a\n  o: &o {x: 1}\n- name: b\n  o: *o # same\n# end\nlast: *o\n"
    document = put(YamlDocument, text, [(("m", OURS, "b"), 1), (("z",), 1)])
    assert document.text() == text.replace("# end", "- name: quantd\n  b: 1\n# end") + "z: 1\n"
    document.remove(("last",))
    document.remove(("z",))
    document.remove(("m", OURS, "b"))
    assert document.text() == text.replace("last: *o\n", "")


def test_inline_tables_of_toml_stay_inline() -> None:
    document = put(
        TomlDocument, "model = {chat = {a = 1}}\n", [(("model", "completion", "http", "kind"), "x")]
    )
    assert tomllib.loads(document.text())["model"]["chat"] == {"a": 1}


def test_blocks_of_emacs_lisp_are_found_by_name() -> None:
    init = "(setq a 1)\n\n(setq b 2)"
    document = put(ElispBlocks, init, [(("one",), "(x)\n"), (("two",), "(y)\n")])
    document.set(("one",), "(z)\n")
    assert document.get(("one",)) == "(z)\n"
    assert document.text().startswith(init + "\n;; >>> quantd connect two\n(y)\n;; <<< quantd connect two\n")
    document.remove(("two",))
    document.remove(("one",))
    assert document.text() == init + "\n"
    with pytest.raises(ConfigError, match="do not pair up"):
        ElispBlocks(";; >>> quantd connect one\n(x)\n")


WORDS = st.text("ab é\"'\\/:#,{}[]-", max_size=5)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | WORDS
KEYS = st.sampled_from([*"abcdefgh", "a b", "é", 'q"'])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=4)


@st.composite
def commented_json(draw) -> tuple[str, dict]:
    """JSON as people leave it: comments and white space anywhere, a comma too many."""
    table = draw(TABLES)
    numbers = iter(range(1000))

    def space() -> str:
        kind = draw(st.sampled_from(["", " ", "\n", "\n  ", "line", "block"]))
        return {"line": f" // c{next(numbers)}\n", "block": f"/* c{next(numbers)} */"}.get(kind, kind)

    def write(value: object) -> str:
        if isinstance(value, dict):
            parts = [
                f"{space()}{json.dumps(key)}{space()}:{space()}{write(item)}{space()}"
                for key, item in value.items()
            ]
        elif isinstance(value, list):
            parts = [f"{space()}{write(item)}{space()}" for item in value]
        else:
            return json.dumps(value)
        comma = f",{space()}" if parts and draw(st.booleans()) else ""
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        return opening + ",".join(parts) + comma + (space() if not parts else "") + closing

    return space() + write(table) + space(), table


def comments(text: str) -> list[str]:
    return re.findall(r"c\d+", text)


@given(commented_json(), KEYS, VALUES.filter(lambda value: value not in (None, {})))
def test_json_keeps_data_and_comments(source: tuple[str, dict], key: str, value: object) -> None:
    text, table = source
    document = JsonDocument(text)
    paths = [("new",), *((name, "new") for name, held in table.items() if isinstance(held, dict))]
    for path in paths:
        document.set(path, value)
    after = document.text()
    expected = {
        name: held | {"new": value} if isinstance(held, dict) else held for name, held in table.items()
    }
    assert json5.loads(after) == expected | {"new": value}
    assert comments(after) == comments(text)
    again = JsonDocument(after)
    for path in paths:
        again.remove(path)
    hollow = {name for name, held in table.items() if held == {}}
    assert json5.loads(again.text()) == {name: held for name, held in table.items() if name not in hollow}


@st.composite
def commented_yaml(draw) -> tuple[str, dict]:
    """YAML as ruamel.yaml writes it, with comments of every indentation before and behind its lines."""
    table, yaml, out = draw(TABLES), YAML(), io.StringIO()
    yaml.width = 2**30
    sequence = draw(st.sampled_from([(2, 0), (4, 2)]))
    yaml.indent(mapping=draw(st.sampled_from([2, 4])), sequence=sequence[0], offset=sequence[1])
    yaml.dump(table, out)
    lines = []
    for number, line in enumerate(out.getvalue().splitlines()):
        if draw(st.booleans()):
            lines.append(" " * draw(st.integers(0, 4)) + f"# c{number}")
        lines.append(line + (f" # c{number + 500}" if draw(st.booleans()) else ""))
    return "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n# c999\n"])), table


@given(commented_yaml(), VALUES.filter(lambda value: value not in (None, {})))
def test_yaml_keeps_its_bytes(source: tuple[str, dict], value: object) -> None:
    text, table = source
    assert YAML(typ="safe", pure=True).load(text) == table
    document = YamlDocument(text)
    paths = [("new",), *((name, "new") for name, held in table.items() if held and isinstance(held, dict))]
    for path in paths:
        document.set(path, value)
    expected = {
        name: held | {"new": value} if held and isinstance(held, dict) else held
        for name, held in table.items()
    }
    assert YAML(typ="safe", pure=True).load(document.text()) == expected | {"new": value}
    for path in paths:
        document.remove(path)
    assert document.text().rstrip("\n") == text.rstrip("\n")
