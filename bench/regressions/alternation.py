"""Two versions of the code measured in turns on this machine: base, new, new, base, base, new, ...

Each turn is a process of its own, which runs the scenario as `spbench run` does. What slows the machine for a
while then slows both sides alike, and neither always goes first.
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

from spbench.bench.atomic_write import write_whole
from spbench.bench.errors import UserError
from spbench.bench.published.comparison import COMPARISON_FILE
from spbench.bench.regressions.checkouts import CodeVersion
from spbench.bench.regressions.rounds import merged_rounds
from spbench.bench.sweep.results import RESULTS_FILE, Row, read_rows

#: seconds that a run which is interrupted has to end its own processes
GRACE_S = 20.0


def run_in_turns(
    versions: Mapping[str, CodeVersion],
    arguments: Sequence[str],
    rounds: int,
    output: Path,
    on_turn: Callable[[int, str], None] = lambda number, side: None,
) -> dict[str, Path]:
    """Measure versions of the code in turns; the rows of each go to a folder of its name in ``output``.

    Where all that is measured is exact, one round says everything, and there are no more.

    Args:
        versions: of the code, by the name of their folder.
        arguments: of `spbench run`, without ``--output``.
        on_turn: called with the round, from 1, and the name of the version before each turn.

    Returns:
        The folder of each version, with cells.jsonl, and comparison.csv if the run made one.

    Raises:
        UserError: a version cannot run that; what it said, in one line.
        KeyboardInterrupt: passed on, when the processes have ended.
    """
    found: dict[str, list[list[Row]]] = {side: [] for side in versions}
    with tempfile.TemporaryDirectory(prefix="spbench-rounds-", ignore_cleanup_errors=True) as scratch:
        for number in range(rounds):
            for side in list(versions)[:: 1 if number % 2 == 0 else -1]:
                on_turn(number + 1, side)
                folder = Path(scratch, f"{side}-{number}")
                said = _run(versions[side], [*arguments, "--output", str(folder)])
                found[side].append(_rows(side, versions[side], folder, said))
            if number == 0 and not any("rounds" in row for by in found.values() for row in merged_rounds(by)):
                break
        return {side: _write(merged_rounds(found[side]), Path(scratch), output, side) for side in versions}


def _run(version: CodeVersion, arguments: Sequence[str]) -> str:
    """Run `spbench run` of a version, and return what it wrote to standard error."""
    # -P: the folder in which the command was given may be a checkout of other code
    command = [sys.executable, "-P", "-m", "spbench", "run", *arguments]
    path = os.pathsep.join(filter(None, (str(version.root), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is this process's to pass on, once
    )
    try:
        said = process.communicate()[1]
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    return said


def _rows(side: str, version: CodeVersion, folder: Path, said: str) -> list[Row]:
    """The rows of a turn, which said this on standard error.

    Raises:
        UserError: there are none, or they were made by other code.
    """
    rows, _ = read_rows(folder / RESULTS_FILE)
    if not rows:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        raise UserError(f"{side} ({version}) cannot run this: {last.removeprefix('spbench: ')}")
    for row in rows:
        made_by = str((row.get("provenance") or {}).get("commit") or "")
        if not made_by or not version.commit.startswith(made_by.removesuffix("-dirty")):
            raise UserError(f"{side} is {version}, but its rows were made by {made_by or 'unknown code'}")
    return rows


def _write(rows: Sequence[Row], scratch: Path, output: Path, side: str) -> Path:
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
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
