"""`spbench --help` and that of every command: exit code 0, at most 100 columns, nothing without its help."""

from __future__ import annotations

import click
import pytest

from spbench.bench.command_line.cli import COMMANDS, exit_code

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
