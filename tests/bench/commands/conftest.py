"""Running a command line in this process."""

from collections.abc import Callable

import pytest

from spbench.bench.cli import exit_code

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function of a command line's words; it returns exit code, output and messages."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = exit_code(arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run
