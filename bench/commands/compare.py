"""`spbench compare`: the gate. Are new results as good as the old ones?"""

from __future__ import annotations

from pathlib import Path

import click

from spbench.bench.commands.judgement_report import judgement_report
from spbench.bench.commands.options import output_folder, printed
from spbench.bench.commands.output import Output
from spbench.bench.commands.turns import compared_in_turns, passed_on

#: rounds of `--run`; docs/regressions.md says which changes they find
ROUNDS = 12


@click.command("compare")
@click.argument("base")
@click.argument("new", required=False)
@click.option("--subset", is_flag=True, help="NEW may lack cells of BASE, and claims that stand on them.")
@click.option(
    "--run",
    "in_turns",
    is_flag=True,
    help="BASE and NEW are commits, branches or tags (NEW: the working tree if left out): run --scenario "
    "with the code of both, in turns on this machine, and compare that.",
)
@click.option("--scenario", help="With --run: name (see spbench list), or path of a YAML file of your own.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=ROUNDS,
    show_default=True,
    help="With --run: how often each side measures what differs from run to run.",
)
@output_folder("With --run: folder for the results, in base/ and new/; default results/runs/compare_NAME.")
@passed_on
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
    """Say whether the results NEW are worse than BASE; exit code 1 if they are.

    Each is a folder with cells.jsonl and comparison.csv, or a cells.jsonl; or a JSON file of
    pytest-benchmark, or a folder of such files, which count as rounds. Sent bytes, memory and simulated times
    of virtual ranks, answers of searches, statuses and errors against published numbers are judged exactly;
    times of real ranks and of benchmarks by a statistical test.
    """
    from spbench.bench.regressions.regressions import judge, read_results

    if in_turns:
        if scenario is None:
            raise click.UsageError("--run needs a --scenario")
        return compared_in_turns(base, new, scenario, rounds, output, arguments, subset=subset)
    if given := [flag for flag, value in (("--scenario", scenario), ("--output", output)) if value]:
        raise click.UsageError(f"{given[0]} needs --run")
    if arguments:
        raise click.UsageError(f"{arguments[0]} needs --run")
    if new is None:
        raise click.UsageError("name the results NEW too, or give --run and a --scenario")
    judgement = judge(read_results(Path(base)), read_results(Path(new)), subset=subset)
    return judgement_report(judgement, f"{new} against {base}")
