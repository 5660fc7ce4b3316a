"""What the tests of pages would catch: planted mistakes in a page.
docs/megatron.md has every argument that `spbench import` maps, and options that exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from spbench.bench.cell import TrainingOptions
from spbench.bench.measure.scenarios.choices import option_mistakes
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.impls.models.model import models
from spbench.impls.registries import backends
from tests.docs import blocks as module
from tests.docs.blocks import blocks, simple_commands
from tests.docs.reader import Reader


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path / "page.md"


def follow(page: Path, text: str) -> int:
    page.write_text(text)
    folder = page.parent / "reader"
    folder.mkdir()
    return Reader(folder, in_process=True).follow(blocks(page))


def console(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```"])


def test_what_is_quoted_right_passes(page: Path) -> None:
    cell = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 8}"
    scenario = f'```yaml title="mine.yaml"\ntitle: Mine\ngroups: [{cell}]\n```\n'
    listed = console("$ spbench list backends", "backends:", "...", "  zero1 ...", "...")
    unknown = console("$ spbench list clustrs", "spbench: no name has ...")
    dry_run = console("$ spbench run --scenario mine.yaml --dry-run", "mine: Mine (1 cells)", "...")
    assert follow(page, "\n\n".join([scenario, listed, unknown, dry_run])) == 3


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["$ spbench list backends", "backends:", "  zero9 ..."], "Expected:"),
        (["$ spbench list backends", "spbench: no backend"], "exit code 0"),
        (["$ spbench list clustrs"], "exit code 2"),
        (["$ spbench list clustrs", "spbench: another error"], "Expected:"),
        (["$ rm -rf results"], "mark the block as slow"),
    ],
)
def test_what_is_quoted_wrong_fails(page: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        follow(page, console(*lines))


def test_marks_are_of_the_next_block_and_of_nothing_else(page: Path) -> None:
    page.write_text("<!-- slow: a minute -->\n<!-- other -->\n```sh\na\n```\n\n```sh\nb \\\n c # d\n```\n")
    first, second = blocks(page)
    assert (first.when, first.why, second.when) == ("slow", "a minute", "default")
    assert [command.line.split() for command in second.commands()] == [["b", "c", "#", "d"]]
    page.write_text("<!-- not run: why -->\n\ntext\n")
    with pytest.raises(AssertionError, match="before no block"):
        list(blocks(page))


def table(*rows: str) -> str:
    return "\n".join(["| what | `$ spbench list` | shows |", "| --- | --- | --- |", *rows])


def test_rows_of_a_table_are_commands(page: Path) -> None:
    rows = ["| all | `backends` | `backends:` and `zero1` |", "| none | | so |", "| any | `clusters` | |"]
    assert follow(page, table(*rows)) == 2
    page.write_text("<!-- slow: a minute -->\n" + table(*rows))
    assert [(block.line, block.when) for block in blocks(page)] == [(4, "slow"), (6, "slow")]


@pytest.mark.parametrize("shown", ["`zero9`", "`zero2` and `zero1`"], ids=["wrong", "in another order"])
def test_a_row_that_shows_another_output_fails(page: Path, shown: str) -> None:
    with pytest.raises(AssertionError, match="Expected:"):
        follow(page, table(f"| all | `backends` | {shown} |"))


def test_a_mark_before_a_table_without_commands_fails(page: Path) -> None:
    page.write_text("<!-- slow: a minute -->\n| a |\n| --- |\n| b |\n")
    with pytest.raises(AssertionError, match="without commands"):
        list(blocks(page))


def test_commands_of_a_line() -> None:
    assert simple_commands("a 'b c' && d | e --f=g  # h") == [["a", "b c"], ["d"], ["e", "--f=g"]]


ROOT = Path(__file__).parents[2]
ARGUMENTS = argument_table("megatron").arguments
PAGE = (ROOT / "docs" / "megatron.md").read_text()


def rows_of(section: str) -> list[list[str]]:
    """The cells of the table of a section, without its header."""
    lines = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")
    ]
    return cells[2:]


def test_every_mapped_argument_is_in_a_row() -> None:
    """Where a row's first column has the arguments."""
    told = set(re.findall(r"`(--[\w-]+)", "\n".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))))
    mapped = {known.name for known in ARGUMENTS.values() if known.outcome == "mapped"}
    assert mapped - told == set()
    assert told <= ARGUMENTS.keys()


@pytest.mark.parametrize(
    ("section", "of", "name"),
    [
        ("The model", "model_options", "gpt3-7b"),
        ("The optimizer and the backend", "training", "megatron"),
    ],
)
def test_every_option_exists(section: str, of: str, name: str) -> None:
    """The options of the table's second column, as `option: value` or alone."""
    found: dict[str, object] = {}
    for _, option, *_ in rows_of(section):
        for text in re.findall(r"`([^`]+)`", option):
            key, colon, value = text.partition(": ")
            if re.fullmatch(r"[a-z_]+", key) and key not in ("seq_len", "precision", "backend"):
                # a name alone, or a value that stands for a number, is given one that any option may have
                known = colon and re.fullmatch(r'[a-z"][\w:"-]*|\d+', value)
                found[key] = yaml.safe_load(value) if known else None
    assert len(found) >= 7
    options = models()[name] if of == "model_options" else backends()[name].options_type()
    own = {field.name for field in fields(options)}
    assert [key for key in found if key not in own | set(TrainingOptions.model_fields)] == []
    for key, value in found.items():
        if value is not None and key in own:
            # a mistake without a path is of options that go together
            assert [message for path, message in option_mistakes(of, name, {key: value}) if path] == []
