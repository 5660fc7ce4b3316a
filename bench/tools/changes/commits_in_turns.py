"""Two versions of a project measured in turns on this machine: base, new, new, base, base, new, ...

Each turn is a process of its own, which runs the scenario as `spbench run` does, in the folder of its version
and with the modules that lie there. What slows the machine for a while then slows both sides alike, and
neither always goes first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.files import resolved, write_whole
from spbench.bench.git import DIRTY, CodeVersion, checkout_around, own_checkout
from spbench.bench.measure.sweep.provenance import commit_of
from spbench.bench.measure.sweep.results import RESULTS_FILE, read_rows
from spbench.bench.row import Row
from spbench.bench.tools.changes.metrics import merged_rounds
from spbench.bench.tools.papers.comparison import COMPARISON_FILE

#: seconds that a run which is interrupted has to end its own processes
GRACE_S = 20.0


def measured_repository() -> Path:
    """The repository whose commits are compared: that around the working folder, else that of spbench's own
    code.

    Raises:
        UserError: there is neither.
    """
    if (root := checkout_around(Path.cwd()) or own_checkout()) is None:
        raise UserError(
            "there are no commits to compare: the working folder is in no git repository, and spbench was "
            "not installed from one; run the command in the folder of your project"
        )
    return root


def run_in_turns(
    versions: Mapping[str, CodeVersion],
    scenario: str,
    arguments: Sequence[str],
    rounds: int,
    output: Path,
    on_turn: Callable[[int, str], None] = lambda number, side: None,
) -> dict[str, Path]:
    """Measure versions of a project in turns; the rows of each go to a folder of its name in ``output``.

    Where all that is measured is exact, one round says everything, and there are no more.

    Args:
        versions: by the name of their folder.
        scenario: a name; or the path of a file: of one in the repository each side takes its own.
        arguments: further ones of `spbench run`, without ``--output``.
        on_turn: called with the round, from 1, and the name of the version before each turn.

    Returns:
        The folder of each version, with cells.jsonl, and comparison.csv if the run made one.

    Raises:
        UserError: a version cannot run that; what it said, in one line.
        KeyboardInterrupt: passed on, when the processes have ended.
    """
    repository = measured_repository()
    rows: dict[str, list[list[Row]]] = {side: [] for side in versions}
    with tempfile.TemporaryDirectory(prefix="spbench-rounds-", ignore_cleanup_errors=True) as scratch:
        for number in range(rounds):
            for side in list(versions)[:: 1 if number % 2 == 0 else -1]:
                on_turn(number + 1, side)
                folder, version = Path(scratch, f"{side}-{number}"), versions[side]
                named = _of_version(scenario, repository, version)
                words = ["--scenario", named, *arguments, "--output", str(folder)]
                said = _run(version, _working_folder(repository, version), words)
                rows[side].append(_rows(side, version, folder, said))
            if number == 0 and not any("rounds" in row for by in rows.values() for row in merged_rounds(by)):
                break
        return {side: _write(merged_rounds(rows[side]), Path(scratch), output, side) for side in versions}


def _counterpart(path: Path, repository: Path, version: CodeVersion) -> Path | None:
    """What has the place of a file or folder of the repository in a version; None: nothing, or the path lies
    elsewhere."""
    path, repository = resolved(path), resolved(repository)
    if not path.is_relative_to(repository):
        return None
    other = version.root / path.relative_to(repository)
    return other if other.exists() else None


def _of_version(scenario: str, repository: Path, version: CodeVersion) -> str:
    """The scenario as a version is asked for it: its own file, else the same for both."""
    if not (file := Path(scenario)).is_file():
        return scenario
    return str(_counterpart(file, repository, version) or resolved(file))


def _working_folder(repository: Path, version: CodeVersion) -> Path:
    """Where a version is run: in what has the place of the working folder, or there if it lies elsewhere."""
    here = Path.cwd()
    if not here.is_relative_to(repository.resolve()):
        return here
    return _counterpart(here, repository, version) or version.root


def _run(version: CodeVersion, folder: Path, arguments: Sequence[str]) -> str:
    """Run `spbench run` of a version in a folder, and return what it wrote to standard error."""
    # -P: modules are those of the version, wherever the folder is
    command = [sys.executable, "-P", "-m", "spbench", "run", *arguments]
    places = [version.root, *filter(Path.is_dir, [version.root / "src"])]
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, places), *inherited])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is this process's to pass on, once
    )
    try:
        return process.communicate()[1]
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _rows(side: str, version: CodeVersion, folder: Path, said: str) -> list[Row]:
    """The rows of a turn, which said this on standard error.

    Raises:
        UserError: there are none, or they were made by another commit.
    """
    rows, _ = read_rows(folder / RESULTS_FILE)
    if not rows:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        raise UserError(f"{side} ({version}) cannot run this: {last.removeprefix('spbench: ')}")
    for made_by in map(commit_of, rows):
        if not made_by or not version.commit.startswith(made_by.removesuffix(DIRTY)):
            raise UserError(f"{side} is {version}, but its rows were made by {made_by or 'unknown code'}")
    return rows


def _write(rows: Sequence[Row], scratch: Path, output: Path, side: str) -> Path:
    lines = [json.dumps(row.as_written(), separators=(",", ":")) + "\n" for row in rows]
    write_whole(output / side / RESULTS_FILE, "".join(lines))
    comparison = scratch / f"{side}-0" / COMPARISON_FILE
    if comparison.exists():
        shutil.copy(comparison, output / side)
    return output / side


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM, by which CI systems end a job, raises KeyboardInterrupt, so that what was made is
    removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
