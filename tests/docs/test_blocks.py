"""What the tests of pages would catch: planted mistakes in a page.
Every code block of README.md, REPRODUCE.md, CONTRIBUTING.md and docs/ is run, or checked without running.
Default: blocks without a mark, which are quick. Slow: all but those that are marked as not run, in the order
of the page. Of all, run or not: the syntax of Bash, the options by the commands' own parsers, and the names
of scenarios, strategies and models by a dry run. `spbench --help` and that of every command: exit code 0, at
most 100 columns, nothing without its help."""

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from spbench.bench.command_line.cli import COMMANDS, cli, exit_code
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.changes.history import MEANT_FILE, TARGETS_FILE, Acceptance, Target, read_entries
from spbench.bench.tools.jobs.argument_tables import argument_table
from tests.docs import blocks as module
from tests.docs.blocks import ALL_BLOCKS, ROOT, SHELL_BLOCKS, Block, blocks, simple_commands
from tests.docs.reader import Reader
from tests.grid import tabled


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


@tabled(__file__, "what_is_quoted_wrong_fails")
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


@pytest.mark.parametrize("shown", ["`zero9`", "`unwrapped` and `fsdp1`"], ids=["wrong", "in another order"])
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
    pages = runpy.run_path(str(ROOT / "scripts" / "reference_pages.py"))["pages"]()
    for path, text in pages.items():
        assert path.read_text().splitlines() == text.splitlines(), path.name


def test_arguments_in_the_table_of_megatron_exist() -> None:
    """docs/reference/arguments.md has all of them."""
    section = (ROOT / "docs" / "import.md").read_text().partition("\n## A launch script of Megatron-LM\n")[2]
    first = re.findall(r"^\| (.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    told = set(re.findall(r"`(--[\w-]+)", "\n".join(first)))
    assert len(told) > 10
    assert told <= argument_table("megatron").arguments.keys()


LANGUAGES = {"sh", "console", "yaml", "toml", "python", "text", "json", "groovy"}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def spbench_arguments() -> list[tuple[Block, list[str]]]:
    """What follows `spbench` in each command of each shell block, also where torchrun starts it."""
    found = []
    for block in SHELL_BLOCKS:
        for command in block.commands():
            for words in simple_commands(command.line):
                if "spbench" in words:
                    found.append((block, words[words.index("spbench") + 1 :]))
    return found


def test_every_block_has_a_language_that_is_checked() -> None:
    assert {block.language for block in ALL_BLOCKS} <= LANGUAGES
    assert len(SHELL_BLOCKS) > 30


def test_the_syntax_of_bash() -> None:
    for block in SHELL_BLOCKS:
        text = "\n".join(command.line for command in block.commands())
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}: {done.stderr}"


def test_every_option_is_one_of_the_command() -> None:
    """As the command itself reads them: names of options, their types, and which are required."""
    checked = 0
    for block, arguments in spbench_arguments():
        command = cli.get_command(click.Context(cli), arguments[0])
        assert command, f"{block}: no command {arguments[0]}"
        try:
            command.make_context(arguments[0], arguments[1:])
        except click.ClickException as error:
            pytest.fail(f"{block}: spbench {' '.join(arguments)}: {error.format_message()}")
        checked += 1
    assert checked > 40


@pytest.mark.slow
def test_what_is_not_run_names_cells_that_there_are(tmp_path: Path) -> None:
    """By a dry run, unless the command reads a file that another machine would have written."""
    reader, lines = Reader(tmp_path, in_process=True), dict[str, Block]()
    for block, arguments in spbench_arguments():
        needs_a_file = any(word.endswith((".yaml", ".py")) for word in arguments)
        if block.when == "not run" and arguments[0] == "run" and not needs_a_file:
            lines[" ".join(["spbench", *arguments, "--dry-run"])] = block
    assert len(lines) > 5
    for line, block in lines.items():
        code, _, err = reader.run(line)
        assert code == 0, f"{block}: {err}"


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.language == "yaml"], ids=str)
def test_yaml(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios, clusters and the files of a history are read, with the page's files at hand; others are YAML
    at least."""
    monkeypatch.chdir(tmp_path)
    for other in blocks(block.page):
        if other.title:
            Path(other.title).write_text(other.text)
    Path("block.yaml").write_text(block.text)
    content = yaml.safe_load(block.text)
    if block.when == "not run":
        assert content
    elif block.title == MEANT_FILE:
        assert read_entries(tmp_path / MEANT_FILE, Acceptance)
    elif block.title == TARGETS_FILE:
        assert read_entries(tmp_path / TARGETS_FILE, Target)
    elif "groups" in content:
        assert sum(map(len, load_scenario("block.yaml").cells.values()))
    elif {"extends", "device"} & content.keys():
        assert load_cluster("block.yaml").usable_memory_bytes
    else:
        pytest.fail(f"{block}: neither a scenario, a cluster nor a file of a history: mark it as not run")


@pytest.mark.parametrize("block", [b for b in ALL_BLOCKS if b.language == "toml"], ids=str)
def test_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


def pages_with(when: str) -> list[Path]:
    """The pages with a block of commands or a program to run then."""
    runnable = ("sh", "console", "python")
    chosen = (b for b in ALL_BLOCKS if b.when == when and b.language in runnable and not b.title)
    return list(dict.fromkeys(block.page for block in chosen))


@pytest.mark.parametrize("page", pages_with("default"), ids=named)
def test_the_quick_blocks_of_a_page(page: Path, tmp_path: Path) -> None:
    chosen = [block for block in blocks(page) if block.when == "default"]
    assert Reader(tmp_path, in_process=True).follow(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("slow"), ids=named)
def test_all_blocks_of_a_page(page: Path, tmp_path: Path) -> None:
    chosen = [block for block in blocks(page) if block.when != "not run"]
    assert Reader(tmp_path, in_process=False).follow(chosen)


COLUMNS = 100


@pytest.mark.parametrize("name", ["", *COMMANDS.names()])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([*name.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"Usage: spbench {name}".strip())
    assert max(map(len, out.splitlines())) <= COLUMNS
    usage = out.split("\n\n")[0]
    assert usage.count("\n") == 0, f"words are broken over lines: {usage}"


def test_the_list_of_commands_cuts_no_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(["--help"])
    helps = capsys.readouterr().out.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in helps] == COMMANDS.names()
    assert not [line for line in helps if line.endswith("...")]


@pytest.mark.parametrize("name", COMMANDS.names())
def test_every_command_and_option_says_what_it_is_for(name: str) -> None:
    command = COMMANDS.load(name)
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts[0]} has no help"
        else:
            assert parameter.human_readable_name.upper() in command.get_usage(click.Context(command))
            assert (parameter.metavar or parameter.human_readable_name.upper()).strip("[]") in command.help
