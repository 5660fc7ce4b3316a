"""`spbench compare`: the gate. Are new results as good as the old ones?

With `--run`, two versions of a project are measured in turns on this machine: base, new, new, base, ...

Each turn is a process of its own, which runs `spbench run` in the folder of its version and with the modules
of that folder. Whatever slows the machine for a while then slows both sides alike, and neither side always
goes first.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from spbench.bench.command_line.options import WholeNumber, path_option, printed, refuse_given, with_options
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import message
from spbench.bench.errors import UserError
from spbench.bench.files import resolved, write_whole
from spbench.bench.git import DIRTY, CodeVersion, checked_out, checkout_around, own_checkout, working_tree
from spbench.bench.measure import RESULTS_FILE, read_rows
from spbench.bench.row import Row, commit_of, json_line
from spbench.bench.tools.changes.judgement import judge, read_suite
from spbench.bench.tools.changes.judgement_report import judgement_report
from spbench.bench.tools.changes.metrics import merged_rounds
from spbench.bench.tools.changes.result_files import read_results
from spbench.bench.tools.papers.comparison import COMPARISON_FILE

#: the seconds that an interrupted run has to end its own processes
GRACE_S = 20.0


def measured_repository() -> Path:
    """The root of the repository whose commits are compared: around the working folder, else spbench's own.

    Raises:
        UserError: neither repository exists.
    """
    if (root := checkout_around(Path.cwd()) or own_checkout()) is None:
        raise UserError(
            "there are no commits to compare: the working folder is in no git repository, and spbench was "
            "not installed from one; run the command in the folder of your project"
        )
    return root


def run_in_turns(
    versions: Mapping[str, CodeVersion], scenario: str, arguments: Sequence[str], rounds: int, output: Path
) -> dict[str, Path]:
    """Measure versions of a project in turns; the rows of each version go to its folder in ``output``. If all
    measured metrics are exact, only one round is run, because more rounds would give the same numbers.

    Args:
        versions: the versions, by the names of their folders in ``output``.
        scenario: a name, or the path of a file; for a file in the repository, each version runs its own copy.
        arguments: further arguments of `spbench run`, without ``--output``.

    Returns:
        The folder of each version, with cells.jsonl, and comparison.csv if the run made one.

    Raises:
        UserError: a version cannot run the scenario; the error has the version's last message.
        KeyboardInterrupt: passed on, when the processes have ended.
    """
    repository, file = measured_repository(), resolved(Path(scenario))
    rows: dict[str, list[list[Row]]] = {side: [] for side in versions}
    with tempfile.TemporaryDirectory(prefix="spbench-rounds-", ignore_cleanup_errors=True) as scratch:
        for number in range(rounds):
            for side in list(versions)[:: 1 if number % 2 == 0 else -1]:
                message(f"round {number + 1} of up to {rounds}: {side}")
                folder, version = Path(scratch, f"{side}-{number}"), versions[side]
                own = _counterpart(file, repository, version, file) if file.is_file() else scenario
                words = ["--scenario", str(own), *arguments, "--output", str(folder)]
                stderr = _run(version, _counterpart(Path.cwd(), repository, version, version.root), words)
                rows[side].append(_rows(side, version, folder, stderr))
            if number == 0 and not any("rounds" in row for by in rows.values() for row in merged_rounds(by)):
                break
        return {side: _write(merged_rounds(rows[side]), Path(scratch), output, side) for side in versions}


def _counterpart(path: Path, repository: Path, version: CodeVersion, lacking: Path) -> Path:
    """The path in a version's tree of a file or folder of the repository; ``lacking`` if the version has no
    such path; ``path`` itself if it lies outside the repository."""
    path, repository = resolved(path), resolved(repository)
    if not path.is_relative_to(repository):
        return path
    other = version.root / path.relative_to(repository)
    return other if other.exists() else lacking


def _run(version: CodeVersion, folder: Path, arguments: Sequence[str]) -> str:
    """Run `spbench run` of a version in a folder, and return the text that it wrote to standard error."""
    # -P: Python imports the version's modules, whatever folder it runs in
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
        start_new_session=True,  # Ctrl-C reaches only this process, which passes it on once
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


def _rows(side: str, version: CodeVersion, folder: Path, stderr: str) -> list[Row]:
    """The rows that a turn wrote to ``folder``; ``stderr`` is the text of the turn's standard error.

    Raises:
        UserError: there are no rows, or the rows name another commit than the version's.
    """
    rows, _ = read_rows(folder)
    if not rows:
        last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "it said nothing")
        raise UserError(f"{side} ({version}) cannot run this: {last.removeprefix('spbench: ')}")
    for made_by in map(commit_of, rows):
        if not made_by or not version.commit.startswith(made_by.removesuffix(DIRTY)):
            raise UserError(f"{side} is {version}, but its rows come from {made_by or 'unknown code'}")
    return rows


def _write(rows: Sequence[Row], scratch: Path, output: Path, side: str) -> Path:
    write_whole(output / side / RESULTS_FILE, "".join(map(json_line, rows)))
    comparison = scratch / f"{side}-0" / COMPARISON_FILE
    if comparison.exists():
        shutil.copy(comparison, output / side)
    return output / side


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """A context in which SIGTERM, by which CI systems end a job, raises KeyboardInterrupt, so that temporary
    files and checkouts are removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


#: the default number of rounds of `--run`; docs/regressions.md says how small a change so many rounds show
ROUNDS = 12

#: options of `spbench run` that choose what is measured; each side's own code reads their values
PASSED_ON = (
    *("--strategy", "--model", "--cluster", "--world-size", "--where"),
    *("--variant", "--engine", "--device", "--timeout"),
)


def _passed_on(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options :data:`PASSED_ON` to a command, which gets the flags and values that the user typed as
    one list, ``arguments``."""

    @functools.wraps(command)
    def collected(**values: Any) -> Any:
        options = {flag: values.pop(flag.removeprefix("--").replace("-", "_")) for flag in PASSED_ON}
        arguments = [word for flag, texts in options.items() for text in texts for word in (flag, text)]
        return command(arguments=arguments, **values)

    text = "With --run: passed to spbench run."
    each = (click.option(flag, multiple=True, metavar="...", help=text) for flag in PASSED_ON)
    return with_options(*each)(collected)


@click.command("compare")
@click.argument("base")
@click.argument("new", required=False)
@click.option("--subset", is_flag=True, help="NEW may lack cells of BASE, and claims computed from them.")
@click.option(
    "--run",
    "in_turns",
    is_flag=True,
    help="BASE and NEW are commits, branches or tags of the repository around the working folder (NEW is by "
    "default the working tree). Run --scenario with both in turns on this machine, and compare.",
)
@click.option("--scenario", help="With --run: name (see spbench list) or path of a scenario.")
@click.option(
    "--rounds",
    type=WholeNumber(min=1),
    default=ROUNDS,
    show_default=True,
    help="With --run: how often each side measures times of real ranks.",
)
@path_option(
    "--output",
    "With --run: folder for the results, in base/ and new/; default results/runs/compare_NAME.",
    folder=True,
)
@_passed_on
@printed
def command(
    base: str,
    new: str | None,
    subset: bool,
    in_turns: bool,
    scenario: str | None,
    rounds: int,
    output: Path | None,
    arguments: list[str],
) -> Output:
    """Say whether the results NEW are worse than BASE.

    The exit code is 1 if they are worse, and 2 if nothing can be judged. NEW and BASE are folders with
    cells.jsonl and comparison.csv, or JSON files of pytest-benchmark, or folders of such files, each of which
    is a round. Numbers of virtual ranks, answers of searches, statuses and errors against published numbers
    are compared exactly. Times of real ranks and of benchmarks are judged by a statistical test.
    """

    if in_turns:
        if scenario is None:
            raise click.UsageError("--run needs a --scenario")
        return _compared_in_turns(base, new, scenario, rounds, output, arguments, subset)
    refuse_given(("scenario", "output", "rounds"), "needs --run")
    if arguments:
        raise click.UsageError(f"{arguments[0]} needs --run")
    if new is None:
        raise click.UsageError("name the results NEW too, or give --run and a --scenario")
    suite = read_suite(Path(new), Path(base))
    assert suite.base
    return judgement_report(judge(suite.base, suite, subset=subset), f"{new} against {base}")


def _compared_in_turns(
    base: str,
    new: str | None,
    scenario: str,
    rounds: int,
    output: Path | None,
    words: list[str],
    subset: bool,
) -> Output:
    """Run a scenario at two commits in turns, and judge the two results.

    Raises:
        UserError: ``base`` or ``new`` names no commit, or the scenario cannot be run at that commit.
    """

    repository = measured_repository()
    target = output or Path("results", "runs", f"compare_{Path(scenario).stem}")
    with termination_as_interrupt(), ExitStack() as stack:
        enter = stack.enter_context
        sides = {"base": enter(checked_out(repository, base))}
        sides["new"] = working_tree(repository) if new is None else enter(checked_out(repository, new))
        message(f"base is {sides['base']}, new is {sides['new']}")
        folders = run_in_turns(sides, scenario, words, rounds, target)
        results = {side: read_results(folder) for side, folder in folders.items()}
    machines = list(dict.fromkeys(name for read in results.values() for name in read.machines))
    made_by = [f"{side} {version}" for side, version in sides.items()]
    return judgement_report(
        judge(results["base"], results["new"], subset=subset),
        f"{made_by[1]} against {made_by[0]}",
        notes=[f"{', '.join(made_by)}, on {'; '.join(machines)}", f"results are in {target}"],
        about={
            **{side: version.commit for side, version in sides.items()},
            "new_changed": sides["new"].changed,
            "machines": machines,
            "folders": {side: str(folder) for side, folder in folders.items()},
        },
    )
