"""What the tests of pages would catch: planted mistakes in a page. Pages that a script writes are current."""

import runpy
from pathlib import Path

import pytest

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


def test_pages_made_from_code_are_current() -> None:
    """`python scripts/reference_pages.py` writes them."""
    script = Path(__file__).parents[2] / "scripts" / "reference_pages.py"
    pages = runpy.run_path(str(script))["pages"]()
    assert [path.name for path, text in pages.items() if path.read_text() != text] == []
