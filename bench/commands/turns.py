"""`spbench compare --run`: two commits measured in turns, and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from spbench.bench.commands.judgement_report import judgement_report
from spbench.bench.commands.output import Output
from spbench.bench.commands.progress import message

#: options of `spbench run` that choose what is measured; each side's own code reads their values
PASSED_ON = (
    "--strategy",
    "--model",
    "--cluster",
    "--world-size",
    "--where",
    "--variant",
    "--engine",
    "--device",
    "--timeout",
)


def passed_on(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options :data:`PASSED_ON`; the command gets what was given of them, flags and values in one
    list, as ``arguments``."""

    @functools.wraps(command)
    def collected(**values: Any) -> Any:
        given = {flag: values.pop(_parameter(flag)) for flag in PASSED_ON}
        arguments = [word for flag, texts in given.items() for text in texts for word in (flag, text)]
        return command(arguments=arguments, **values)

    for flag in reversed(PASSED_ON):
        option = click.option(flag, multiple=True, metavar="...", help="With --run: as of spbench run.")
        collected = option(collected)
    return collected


def _parameter(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def compared_in_turns(
    base: str,
    new: str | None,
    scenario: str,
    rounds: int,
    output: Path | None,
    arguments: list[str],
    *,
    subset: bool,
) -> Output:
    """Run a scenario with the code of two commits in turns, and judge what that gave.

    Args:
        base, new: refs; new None: the working tree.
        rounds: of each side, where anything measured differs from run to run.
        output: results go to base/ and new/ in it; None: to results/runs/compare_NAME.
        arguments: further ones of `spbench run`.

    Raises:
        UserError: a ref names no commit, or its code cannot run the scenario.
    """
    from spbench.bench.regressions.alternation import run_in_turns, termination_as_interrupt
    from spbench.bench.regressions.checkouts import checked_out, own_repository, working_tree
    from spbench.bench.regressions.regressions import judge, read_results

    repository = own_repository()
    path = Path(scenario)
    target = output or Path("results", "runs", f"compare_{path.stem}")
    if path.is_file():  # a file of the user's, the same for both; a name is of each side's own scenarios
        scenario = str(path.resolve())
    with termination_as_interrupt(), ExitStack() as stack:
        versions = {"base": stack.enter_context(checked_out(repository, base))}
        versions["new"] = (
            working_tree(repository) if new is None else stack.enter_context(checked_out(repository, new))
        )
        message(f"base is {versions['base']}, new is {versions['new']}")
        folders = run_in_turns(
            versions,
            ["--scenario", scenario, *arguments],
            rounds,
            target,
            lambda number, side: message(f"round {number} of up to {rounds}: {side}"),
        )
        results = {side: read_results(folder) for side, folder in folders.items()}
    machines = list(dict.fromkeys(name for found in results.values() for name in found.machines))
    made_by = [f"{side} {version}" for side, version in versions.items()]
    return judgement_report(
        judge(results["base"], results["new"], subset=subset),
        f"{made_by[1]} against {made_by[0]}",
        notes=[f"{', '.join(made_by)}, on {'; '.join(machines)}", f"results are in {target}"],
        about={
            "base": versions["base"].commit,
            "new": versions["new"].commit,
            "new_changed": versions["new"].changed,
            "machines": machines,
            "folders": {side: str(folder) for side, folder in folders.items()},
        },
    )
