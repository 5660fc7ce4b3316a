"""Every code block of README.md, REPRODUCE.md, CONTRIBUTING.md and docs/ is run, or checked without running.
Default: blocks without a mark, which are quick. Slow: all but those that are marked as not run, in the order
of the page. Of all, run or not: the syntax of Bash, the options by the commands' own parsers, and the names
of scenarios, strategies and models by a dry run. `spbench --help` and that of every command: exit code 0, at
most 100 columns, nothing without its help."""

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
from tests.docs.blocks import ALL_BLOCKS, ROOT, SHELL_BLOCKS, Block, blocks, simple_commands
from tests.docs.reader import Reader

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
    assert len(lines) > 10
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
