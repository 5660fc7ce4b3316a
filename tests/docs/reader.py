"""Somebody who does what a page says: writes its files and runs its commands in order."""

import doctest
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from spbench.bench.command_line.cli import exit_code
from tests.docs.blocks import ROOT, Block, Command, simple_commands
from tests.terminal import outputs_checked

#: how a quoted error begins, which is how every one of ours does
ERROR = "spbench: "
LIMIT_S = 1500


class Reader:
    """Runs blocks in a folder that has the committed scenarios and baselines, as a checkout does.

    Args:
        in_process: run `spbench` here, where torch is imported, and nothing else; otherwise by Bash.
    """

    def __init__(self, folder: Path, in_process: bool):
        self.folder, self.in_process = folder, in_process
        (folder / "scenarios").symlink_to(ROOT / "scenarios")
        # results are copied: what a command writes must not reach those of the checkout
        for name in ("baseline", "reproduction"):
            ignored = shutil.ignore_patterns("figures")
            shutil.copytree(ROOT / "results" / name, folder / "results" / name, ignore=ignored)

    def follow(self, blocks: Iterable[Block]) -> int:
        """Do what the blocks say, in order, and return the number of commands and programs that were run.

        Raises:
            AssertionError: a command failed, or printed something else than the page quotes.
        """
        ran = 0
        for block in blocks:
            if block.title:
                (self.folder / block.title).write_text(block.text)
            elif block.language == "python":
                self._expect(block, *self._program(block.text), Command("python"))
                ran += 1
            elif block.language in ("sh", "console"):
                for command in block.commands():
                    self._expect(block, *self.run(command.line), command)
                    ran += 1
        return ran

    def _expect(self, block: Block, code: int, out: str, err: str, command: Command) -> None:
        quoted = command.output
        where = f"{block}: {command.line}: exit code {code}\n{out}\n{err}"
        fails = quoted is not None and quoted.startswith(ERROR)
        assert (code != 0) == fails, where
        if quoted is not None:
            check, flags = doctest.OutputChecker(), doctest.ELLIPSIS
            got = (err if fails else out).rstrip("\n") + "\n"
            example = doctest.Example(command.line, quoted.rstrip("\n") + "\n")
            assert check.check_output(example.want, got, flags), (
                f"{where}\n{check.output_difference(example, got, flags)}"
            )

    def _program(self, text: str) -> tuple[int, str, str]:
        if not self.in_process:
            return self._subprocess(sys.executable, "-c", text)
        out = io.StringIO()
        with chdir(self.folder), redirect_stdout(out):
            exec(compile(text, "block", "exec"), {"__name__": "__main__"})
        return 0, out.getvalue(), ""

    def run(self, line: str) -> tuple[int, str, str]:
        """The exit code, standard output and standard error of a command line."""
        if not self.in_process:
            return self._subprocess("bash", "-c", f"set -o pipefail; {line}")
        out, err, code = io.StringIO(), io.StringIO(), 0
        with chdir(self.folder), redirect_stdout(out), redirect_stderr(err), outputs_checked():
            for program, *arguments in simple_commands(line):
                assert program == "spbench", f"mark the block as slow: {line}"
                code = code or exit_code(arguments)
        return code, out.getvalue(), err.getvalue()

    def _subprocess(self, *command: str) -> tuple[int, str, str]:
        programs = self.folder / ".programs"
        if not programs.exists():
            programs.mkdir()
            for name, what in (("spbench", "-m tests.docs.checked_spbench"), ("python", "")):
                (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n')
                (programs / name).chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        return done.returncode, done.stdout, done.stderr
