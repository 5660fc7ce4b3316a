"""`spbench compare`: the gate. Are new results as good as the old ones?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from spbench.bench.command_line.options import path_option, printed, refuse_given
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import message
from spbench.bench.git import checked_out, working_tree
from spbench.bench.tools.changes.commits_in_turns import (
    measured_repository,
    run_in_turns,
    termination_as_interrupt,
)
from spbench.bench.tools.changes.judgement import check_gate, judge
from spbench.bench.tools.changes.judgement_report import judgement_report
from spbench.bench.tools.changes.result_files import read_results

#: rounds of `--run`; docs/regressions.md says which changes they find
ROUNDS = 12

#: options of `spbench run` that choose what is measured; each side's own code reads their values
PASSED_ON = (
    *("--strategy", "--model", "--cluster", "--world-size", "--where"),
    *("--variant", "--engine", "--device", "--timeout"),
)


def _passed_on(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options :data:`PASSED_ON`; the command gets what was given of them, flags and values in one
    list, as ``arguments``."""

    @functools.wraps(command)
    def collected(**values: Any) -> Any:
        given = {flag: values.pop(flag.removeprefix("--").replace("-", "_")) for flag in PASSED_ON}
        arguments = [word for flag, texts in given.items() for text in texts for word in (flag, text)]
        return command(arguments=arguments, **values)

    for flag in reversed(PASSED_ON):
        option = click.option(flag, multiple=True, metavar="...", help="With --run: as of spbench run.")
        collected = option(collected)
    return collected


@click.command("compare")
@click.argument("base")
@click.argument("new", required=False)
@click.option("--subset", is_flag=True, help="NEW may lack cells of BASE, and claims that stand on them.")
@click.option(
    "--run",
    "in_turns",
    is_flag=True,
    help="BASE and NEW are commits, branches or tags of the repository around the working folder (NEW: the "
    "working tree if left out): run --scenario with both, in turns on this machine, and compare that.",
)
@click.option("--scenario", help="With --run: name (see spbench list), or path of a YAML file of your own.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=ROUNDS,
    show_default=True,
    help="With --run: how often each side measures what differs from run to run.",
)
@path_option(
    "--output", "With --run: folder for the results, in base/ and new/; default results/runs/compare_NAME."
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

    Exit code 1 if they are, 2 if nothing can be judged. Each is a folder with cells.jsonl and comparison.csv,
    or a cells.jsonl; or a JSON file of pytest-benchmark, or a folder of such files, which count as rounds.
    Sent bytes, memory and simulated times of virtual ranks, answers of searches, statuses and errors against
    published numbers are judged exactly; times of real ranks and of benchmarks by a statistical test.
    """

    if in_turns:
        if scenario is None:
            raise click.UsageError("--run needs a --scenario")
        return _compared_in_turns(base, new, scenario, rounds, output, arguments, subset=subset)
    refuse_given(("scenario", "output", "rounds"), "needs --run")
    if arguments:
        raise click.UsageError(f"{arguments[0]} needs --run")
    if new is None:
        raise click.UsageError("name the results NEW too, or give --run and a --scenario")
    results = read_results(Path(base)), read_results(Path(new), judged=True)
    check_gate(*results)
    judgement = judge(*results, subset=subset)
    return judgement_report(judgement, f"{new} against {base}")


def _compared_in_turns(
    base: str,
    new: str | None,
    scenario: str,
    rounds: int,
    output: Path | None,
    arguments: list[str],
    *,
    subset: bool,
) -> Output:
    """Run a scenario at two commits in turns, and judge what that gave.

    Raises:
        UserError: a ref names no commit, or the scenario cannot be run there.
    """

    repository = measured_repository()
    target = output or Path("results", "runs", f"compare_{Path(scenario).stem}")
    with termination_as_interrupt(), ExitStack() as stack:
        sides = {
            side: working_tree(repository)
            if ref is None
            else stack.enter_context(checked_out(repository, ref))
            for side, ref in (("base", base), ("new", new))
        }
        message(f"base is {sides['base']}, new is {sides['new']}")
        folders = run_in_turns(
            sides,
            scenario,
            arguments,
            rounds,
            target,
            lambda number, side: message(f"round {number} of up to {rounds}: {side}"),
        )
        results = {side: read_results(folder) for side, folder in folders.items()}
    machines = list(dict.fromkeys(name for read in results.values() for name in read.machines))
    made_by = [f"{side} {version}" for side, version in sides.items()]
    return judgement_report(
        judge(results["base"], results["new"], subset=subset),
        f"{made_by[1]} against {made_by[0]}",
        notes=[f"{', '.join(made_by)}, on {'; '.join(machines)}", f"results are in {target}"],
        about={
            "base": sides["base"].commit,
            "new": sides["new"].commit,
            "new_changed": sides["new"].changed,
            "machines": machines,
            "folders": {side: str(folder) for side, folder in folders.items()},
        },
    )
