"""The command line. Results go to standard output, progress and messages to standard error.

Exit codes: 0 done; 1 a cell failed or a strategy is not green; 2 something the user can mend, told in one
line; 70 a fault of the program; 130 interrupted; 141 the reader of the output went away. With
SPBENCH_DEBUG=1 errors keep their traceback.

Imports that bring in torch stand inside the commands, so that help and listings are quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from spbench.bench.commands.options import FORMATS, Numbers, Words, choosing_cells, many

KINDS = ("scenarios", "strategies", "models", "clusters")


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from spbench.bench.sweep.provenance import installed_version

        click.echo(f"spbench {installed_version('spbench') or '(not installed)'}")
        context.exit()


class _ReaderGone(Exception):
    """Whoever read our output has closed it."""


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # of which click would make exit code 1
            raise _ReaderGone from error


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show it."
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Benchmark and reproduce sequence parallelism."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@choosing_cells
@many("--engine", Words(), "Run on these engines instead of the scenario's.")
@click.option("--jobs", type=click.IntRange(min=1), help="Cells at a time; the usable cores if left out.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder for results; default results/runs/NAME."
)
@click.option("--fresh", is_flag=True, help="Start again; earlier results are moved aside.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Give a cell up after this time, whatever the scenario says.",
)
@click.option("--dry-run", is_flag=True, help="Say what would run, and run nothing.")
@click.option("--format", "form", type=FORMATS, default="table", show_default=True, help="What is printed.")
def run(
    scenario: str,
    strategy: tuple[str, ...],
    model: tuple[str, ...],
    cluster: tuple[str, ...],
    engine: tuple[str, ...],
    world_size: tuple[int, ...],
    variant: str | None,
    jobs: int | None,
    output: Path | None,
    fresh: bool,
    timeout: float | None,
    dry_run: bool,
    form: str,
) -> int:
    """Run a scenario's cells, and compare them with what was published.

    Results are kept cell by cell: a run that was interrupted goes on where it was. A cell whose cluster,
    model, strategy, code or torch has changed since is run again.
    """
    from spbench.bench.commands.run import Request, dry_run_scenario, run_scenario
    from spbench.bench.config.select import Narrowing

    narrowing = Narrowing(strategy, model, cluster, engine, world_size, variant)
    request = Request(scenario, narrowing, jobs, output, fresh, form, timeout)
    return dry_run_scenario(request) if dry_run else run_scenario(request)


@cli.command("list")
@click.argument("kind", type=click.Choice(KINDS), required=False)
def list_(kind: str | None) -> int:
    """List scenarios, strategies, models or clusters; all of them if none is named."""
    from spbench.bench.commands.listing import list_kind

    for wanted in [kind] if kind else KINDS:
        list_kind(wanted)
    return 0


@cli.command()
@many("--strategy", Words(), "Verify these strategies; all if left out.")
@many("--model", Words(), "On these models; the tiny ones if left out.")
@many("--world-size", Numbers(), "On these numbers of ranks; 1, 2, 3 and 4 if left out.")
@many("--dtype", Words(), "In these precisions (fp64, fp32, bf16, fp16); fp64 if left out.")
@many("--part", Words(), "These parts of the models; all if left out.")
@click.option(
    "--backend", default="legacy_ddp", show_default=True, help="Gradients held and summed by this one."
)
@click.option("--format", "form", type=FORMATS, default="table", show_default=True, help="What is printed.")
def verify(
    strategy: tuple[str, ...],
    model: tuple[str, ...],
    world_size: tuple[int, ...],
    dtype: tuple[str, ...],
    part: tuple[str, ...],
    backend: str,
    form: str,
) -> int:
    """Check strategies against the single-device model on real ranks: outputs and every gradient."""
    from spbench.bench.commands.run import verify_strategies

    sizes, dtypes = world_size or (1, 2, 3, 4), dtype or ("fp64",)
    return verify_strategies(strategy, model, sizes, dtypes, part, backend, form)


@cli.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--subset", is_flag=True, help="NEW may lack cells of BASE, and claims that stand on them.")
@click.option("--format", "form", type=FORMATS, default="table", show_default=True, help="What is printed.")
def compare(base: Path, new: Path, subset: bool, form: str) -> int:
    """Say whether the results NEW are worse than BASE; exit code 1 if they are.

    Each is a folder with cells.jsonl and comparison.csv, or a cells.jsonl. Sent bytes, memory and simulated
    times of virtual ranks, answers of searches, statuses and errors against published numbers are judged;
    times of real ranks are not.
    """
    from spbench.bench.comparison.regressions import compare_results

    return compare_results(base, new, subset, form)


@cli.command()
@many("--scenario", Words(), "Baselines of these scenarios.")
@click.option("--variant", help="A variant of their settings, or 'all'; the first if left out.")
@click.option("--jobs", type=click.IntRange(min=1), help="Cells at a time; the usable cores if left out.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder of the baselines; default results/baseline."
)
@click.option("--resume", is_flag=True, help="Keep the rows in results/runs that are up to date.")
def baseline(
    scenario: tuple[str, ...], variant: str | None, jobs: int | None, output: Path | None, resume: bool
) -> int:
    """Run scenarios afresh on virtual ranks, and write the results for spbench compare."""
    from spbench.bench.commands.baseline import FOLDER, make_baselines

    if not scenario:
        raise click.UsageError("name at least one --scenario")
    return make_baselines(scenario, variant, jobs, output or FOLDER, resume)


@cli.command()
@click.option("--scenario", required=True, help="A scenario with a published table: its name or its file.")
@click.option("--table", required=True, help="The table's name in the scenario.")
@click.option("--quantity", default="throughput_tokens_per_s", show_default=True, help="Its column.")
@click.option(
    "--fit",
    "fits",
    multiple=True,
    required=True,
    metavar="SCALAR:COLUMN=VALUE[,...]",
    help="Fit a scalar on the rows that have these values; fits are done in the order given.",
)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def calibrate(scenario: str, table: str, quantity: str, fits: tuple[str, ...], form: str) -> int:
    """Fit a cluster's few scalars to published throughputs, and show every row's error."""
    from spbench.bench.commands.calibrate import calibrate_cluster

    return calibrate_cluster(scenario, table, quantity, fits, form)


@cli.command()
@choosing_cells
@click.option("--batch", type=click.IntRange(min=1), help="Only this batch; where one is searched for, it.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Likewise for the sequence length.")
@many("--ranks", Numbers(least=0), "Ranks to write; the first of each pipeline stage if left out.")
@click.option(
    "--output", type=click.Path(path_type=Path), default="trace.json", show_default=True, help="The file."
)
def trace(
    scenario: str,
    strategy: tuple[str, ...],
    model: tuple[str, ...],
    cluster: tuple[str, ...],
    world_size: tuple[int, ...],
    variant: str | None,
    batch: int | None,
    seq_len: int | None,
    ranks: tuple[int, ...],
    output: Path,
) -> int:
    """Write the simulated step of one cell, event by event, as a trace that Perfetto opens."""
    from spbench.bench.commands.trace import write_trace
    from spbench.bench.config.select import Narrowing

    narrowing = Narrowing(strategy, model, cluster, ("virtual",), world_size, variant)
    return write_trace(scenario, narrowing, {"batch": batch, "seq_len": seq_len}, ranks, output)


@cli.command()
@click.argument("paper")
@click.option("--all-variants", is_flag=True, help="Every variant of the scenarios' settings, not the first.")
@click.option("--jobs", type=click.IntRange(min=1), help="Cells at a time; the usable cores if left out.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder for results; default results/reproduction."
)
@click.option("--fresh", is_flag=True, help="Start again; earlier results are moved aside.")
@click.option("--write", is_flag=True, help="Write the generated parts of REPRODUCE.md anew.")
@click.option("--format", "form", type=FORMATS, default="table", show_default=True, help="What is printed.")
def reproduce(
    paper: str,
    all_variants: bool,
    jobs: int | None,
    output: Path | None,
    fresh: bool,
    write: bool,
    form: str,
) -> int:
    """Run every scenario of PAPER (rsa, lasp, dsp, or all) and set each published number beside ours.

    Cells are kept in results/runs: what was interrupted goes on where it was.
    """
    from spbench.bench.commands.reproduce import FOLDER, Reproduction
    from spbench.bench.commands.reproduce import reproduce as reproduce_papers

    document = Path("REPRODUCE.md") if write else None
    return reproduce_papers(Reproduction(paper, all_variants, jobs, output or FOLDER, fresh, document, form))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `spbench`."""
    sys.exit(exit_code(arguments))


def exit_code(arguments: Sequence[str] | None) -> int:
    """Run a command line, tell its errors, and return its exit code."""
    from spbench.bench.errors import UserError

    try:
        code = cli.main(arguments, prog_name="spbench", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except (BrokenPipeError, _ReaderGone):
        _silence_output()
        return 141
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", 130)
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except UserError as error:
        return _complain(str(error), 2, traced=True)
    except OSError as error:
        if error.filename is None:
            _silence_output()
        return _complain(f"{error.filename or 'standard output'}: {error.strerror}", 2, traced=True)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error} (SPBENCH_DEBUG=1 shows where)"
        return _complain(text, 70, traced=True)


def _complain(text: str, code: int, *, traced: bool = False) -> int:
    if traced and os.environ.get("SPBENCH_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
    print(f"spbench: {' '.join(text.split())}", file=sys.stderr)
    return code


def _silence_output() -> None:
    """Nothing is left to be written, and to fail, when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
