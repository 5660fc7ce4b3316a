"""One reader and one writer of YAML: its words, its limits, and the same from both of PyYAML's parsers."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench import yaml_text
from spbench.bench.yaml_files import packaged
from spbench.bench.yaml_text import YAMLProblem, dump, load

PACKAGES = ("spbench.scenarios", "spbench.scenarios.clusters", "spbench.bench.tools.jobs")
PACKAGED = [path for package in PACKAGES for path in packaged(package).values()]

#: a letter for each of nine aliases of the line before
_LEVELS = [chr(98 + i) for i in range(11)]


def bomb(line: str) -> str:
    """A text whose aliases repeat each other: nine times as many values a level."""
    repeated = (line.format(here, ",".join([f"*{chr(ord(here) - 1)}"] * 9)) for here in _LEVELS)
    return "a: &a {x: 1}\n" + "\n".join(repeated)


TOO_MUCH = {
    "aliases": (bomb("{0}: &{0} [{1}]"), "more than 100000 values, as aliases repeat them"),
    "merges": (bomb("{0}: &{0} {{{{<<: [{1}]}}}}".replace("{{{{", "{{").replace("}}}}", "}}")), "as aliases"),
    "chain": (
        "".join(f"a{i}: &a{i} [*a{i - 1}]\n" if i else "a0: &a0 [1]\n" for i in range(99)),
        "64 levels",
    ),
    "lists": ("[" * 5000, "nested more than 64 deep"),
    "mappings": ("{a: " * 5000, "nested more than 64 deep"),
    "values": ("[" + "1," * 150_000 + "]", "more than 100000 values"),
    "characters": ("a: " + "b" * 2**20, "more than 1048576"),
    "itself": ("&a [*a]", "an alias stands within what it stands for"),
}

#: what a text is, where YAML 1.1, YAML 1.2 and people differ
WORDS: dict[str, Any] = {
    "060": 60,
    "0o60": 48,
    "0x10": 16,
    "131_072": 131072,
    "+7": 7,
    ".5": 0.5,
    "1e3": 1000.0,
    "-.inf": -float("inf"),
    "1:30": "1:30",
    "0b11": "0b11",
    "on": "on",
    "No": "No",
    "y": "y",
    "True": True,
    "~": None,
    "2024-13-45": "2024-13-45",
    "2024-01-02": "2024-01-02",
    "=": "=",
    '"<<"': "<<",
}

REFUSED = {
    "!!timestamp y": "the tag '!!timestamp' is not read",
    "!!int x": "the tag '!!int' is not read",
    "!x y": "the tag '!x' is not read",
    "!!python/object/apply:os.getcwd []": "is not read",
    "{a: 1, a: 2}": "the key 'a' is given twice",
    "{[1]: 2}": "a key must be a word",
    "{<<: 3}": "<< merges a mapping",
    "*x": "undefined alias",
    "1" * 5000: "cannot be read",
    '"\\ud800"': "cannot be read",
    "a: 'b": "found unexpected end of stream",
}


@pytest.mark.parametrize("parser", [yaml_text._Loader, yaml_text._QuickLoader], ids=["python", "libyaml"])
class TestOfEachParser:
    @pytest.fixture(autouse=True)
    def _only(self, parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(yaml_text, "_QuickLoader", parser)
        monkeypatch.setattr(yaml_text, "_Loader", parser)

    def test_words(self) -> None:
        assert {text: repr(load(text)) for text in WORDS} == {
            text: repr(word) for text, word in WORDS.items()
        }

    @pytest.mark.parametrize("text", REFUSED)
    def test_what_is_refused(self, text: str) -> None:
        with pytest.raises(YAMLProblem) as raised:
            load(text)
        if text[0] not in 'a"':  # each parser has words of its own for malformed text
            assert REFUSED[text] in raised.value.message
        assert raised.value.line is not None

    @pytest.mark.parametrize("kind", [name for name in TOO_MUCH if name not in ("values", "mappings")])
    def test_limits(self, kind: str) -> None:
        text, problem = TOO_MUCH[kind]
        with pytest.raises(YAMLProblem, match=problem):
            load(text)

    def test_merges(self) -> None:
        assert load("{<<: [{a: 1, b: 2}, {a: 3, c: 4}], b: 5}") == {"a": 1, "b": 5, "c": 4}


@pytest.mark.parametrize("kind", ["values", "mappings"])
def test_limits_that_libyaml_alone_reaches_soon(kind: str) -> None:
    text, problem = TOO_MUCH[kind]
    with pytest.raises(YAMLProblem, match=problem):
        load(text)


@pytest.mark.parametrize("path", [*PACKAGED[::5], *(p for p in PACKAGED if p.stem == "l40s")], ids=str)
def test_packaged_files_are_the_same_to_both_parsers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text(encoding="utf-8")
    quick = load(text)
    monkeypatch.setattr(yaml_text, "_QuickLoader", yaml_text._Loader)
    assert load(text) == quick


@pytest.mark.slow
@pytest.mark.parametrize("path", PACKAGED, ids=str)
def test_every_packaged_file_is_the_same_to_both_parsers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_packaged_files_are_the_same_to_both_parsers(path, monkeypatch)


def test_the_whole_is_what_pyyaml_reads_where_both_schemas_agree() -> None:
    path = packaged("spbench.scenarios")["mpt_fsdp"]  # with anchors, merges and floats
    text = path.read_text(encoding="utf-8")
    assert load(text) == yaml.safe_load(text)


@pytest.mark.parametrize("flow", [True, False])
def test_what_is_written_is_read_again(flow: bool) -> None:
    words = [*WORDS, "1e5", "a: b", "# x", " a", "", "\n", "é", "\x07", "- x", "*a", "!!int", "{", "%", "[]"]
    content = {
        "list": words,
        **{f"{word}": word + "!" for word in words},
        "none": None,
        "n": 1e-6,
        "yes": True,
    }
    assert load(dump(content, flow=flow)) == content
