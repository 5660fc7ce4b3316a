"""A user's folder whose files have the names of our folders, and what can be run in it."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.grid import data

#: of the folders at the top of the repository
NAMES = ("bench", "impls", "plots", "results", "scenarios", "scripts", "tests")
SCENARIO = data(__file__)["SCENARIO"]
SUITE = data(__file__)["SUITE"]


class UserFolder:
    """A folder in which everything that has one of our names raises when it is imported.

    Args:
        folder: an empty one.
        python: the interpreter.
        path: what PYTHONPATH says.
    """

    def __init__(self, folder: Path, python: str = sys.executable, path: Iterable[Path] = ()):
        self.folder, self.python, self.path = folder, python, os.pathsep.join(map(str, path))
        for name in NAMES:
            (folder / f"{name}.py").write_text(f"raise RuntimeError('imported the {name}.py of the user')\n")
        (folder / "bench_of_mine.py").write_text("VALUE = 1\n")
        (folder / "mine.yaml").write_text(SCENARIO)
        (folder / "test_mine.py").write_text(SUITE)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The interpreter in the folder, with these arguments."""
        environment = {**os.environ, "PYTHONPATH": self.path}
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
