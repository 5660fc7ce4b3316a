"""`spbench calibrate`: fit a cluster's scalars to published step times, measure a machine, or read logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from spbench.bench.command_line.options import (
    WORDS,
    WholeNumber,
    many,
    numbers,
    path_option,
    printed,
    refuse_given,
)
from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import resolved, write_whole
from spbench.bench.measure import cluster_names, cluster_of_content, load_cluster
from spbench.bench.tools.calibrate.cluster_of_logs import cluster_of_logs, heading
from spbench.bench.tools.calibrate.log_findings import findings_of
from spbench.bench.yaml_text import comment, dump


def cluster_from_logs(logs: Sequence[Path], extends: str | None, output: Path) -> Output:
    """Read the logs and write the cluster's file ``output``; nothing is written if a log is wrong.

    Raises:
        UserError: a log is of no known kind, damaged, or not of the card; there is no cluster ``extends``.
    """
    if output.suffix not in (".yaml", ".yml"):
        output = output.with_name(f"{output.name}.yaml")
    if extends is not None and extends not in cluster_names():
        raise UserError(f"--extends: no packaged cluster {extends!r}{suggestion(extends, cluster_names())}")
    if resolved(output) in [resolved(path) for path in logs]:
        raise UserError(f"--output {output} is one of the logs")
    base = load_cluster(extends) if extends else None
    findings = {str(path): findings_of(path) for path in dict.fromkeys(logs)}
    cluster = cluster_of_logs(findings, base)
    words = ["spbench calibrate --from", *findings, *(["--extends", extends] if extends else [])]
    said = "".join(f"{comment(line)}\n" for line in [" ".join(words), *heading(cluster)])
    text = said + dump(cluster.content, width=110)
    cluster_of_content(output, text.encode())  # raises UserError where the file could not be read again
    write_whole(output, text)
    instead = (
        f"what {extends} says is used" if extends else "nothing is timed by them; --extends names a cluster"
    )
    missing = [f"still missing: {'; '.join(cluster.missing)}: {instead}"] if cluster.missing else []
    return Output(
        [Table(f"The cluster {output.stem}: what the logs say", cluster.fitted)],
        {
            "cluster": cluster.content,
            "figures": cluster.fitted,
            "missing": cluster.missing,
            "remarks": cluster.remarks,
        },
        cluster.fitted,
        notes=[
            *cluster.remarks,
            *missing,
            f"to see it by kind of work: spbench list cluster {output}",
            f"to simulate on it: spbench run --scenario NAME --cluster {output}",
        ],
        files=[output],
    )


#: the parameters that go with one way of making a cluster's figures alone
_OF_WAYS = {
    "--scenario": ("quantity",),
    "--engine": (
        *("device", "world_size", "precision"),
        *("message_bytes", "sides", "lengths"),
    ),
    "--from": ("extends",),
}


@click.command("calibrate")
@click.option("--scenario", help="A scenario with a published table: its name or its file.")
@click.option("--table", help="The table's name in the scenario.")
@click.option("--quantity", default="throughput_tokens_per_s", show_default=True, help="Its column.")
@click.option(
    "--fit",
    "fits",
    multiple=True,
    metavar="SCALAR:COLUMN=VALUE[,...]",
    help="Fit a scalar on the rows that have these values; fits are done in the order given.",
)
@click.option(
    "--engine",
    type=click.Choice(["distributed", "emulated"]),
    help="Measure this machine: on real ranks with their collectives, or on one device alone.",
)
@click.option(
    "--check",
    metavar="SCENARIO",
    help="With --engine distributed, on CPUs: measure this scenario's cells too, such as closed_loop, and "
    "predict them from what was measured of the machine; a file for each number of ranks.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where ranks have tensors; cuda where torch sees a GPU, else cpu, if left out.",
)
@click.option("--world-size", type=WholeNumber(min=1), help="Ranks; 2, or all GPUs, if left out.")
@many(
    "--precision", WORDS, "Precision of matmuls and attention; fp32, or bf16,fp16,fp32 on GPUs, if left out."
)
@many(
    "--message-bytes",
    numbers(4),
    "Sizes of the collectives' messages instead of 1 KiB to 64 MiB (1 GiB on GPUs).",
)
@many("--sides", numbers(), "Sides of the matrices instead of 128 to 2048 (16384).")
@many("--lengths", numbers(), "Sequence lengths of attention instead of 128 to 2048 (32768).")
@click.option(
    "--from",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE...",
    help="Take the rates from logs: of nccl-tests, mamf-finder, flash-attention's benchmark, or traces of "
    "torch.profiler.",
)
@click.argument("more_logs", nargs=-1, metavar="", type=click.Path(path_type=Path))
@click.option(
    "--extends", metavar="CLUSTER", help="With --from: the packaged cluster that all else is taken from."
)
@path_option(
    "--output",
    "The file of the cluster that --engine or --from makes; samples and plots go beside it.",
    default="measured.yaml",
    show_default=True,
)
@printed
def command(
    scenario: str | None,
    table: str | None,
    quantity: str,
    fits: tuple[str, ...],
    engine: str | None,
    check: str | None,
    output: Path,
    device: str | None,
    world_size: int | None,
    precision: tuple[str, ...],
    logs: tuple[Path, ...],
    more_logs: tuple[Path, ...],
    extends: str | None,
    **sizes: tuple[int, ...],
) -> Output:
    """Fit or measure the rates of a cluster.

    Fit a cluster's few scalars to published throughputs, and show every row's error (--scenario, --table,
    --fit), measure this machine (--engine), or read what benchmarks wrote (--from FILE...). The latter two
    write a cluster file for --cluster."""
    ways = {"--scenario": bool(scenario or table or fits), "--engine": bool(engine), "--from": bool(logs)}
    if sum(ways.values()) != 1:
        raise UserError("give either --scenario, --table and --fit, or --engine, or --from")
    if more_logs and not logs:
        raise UserError(f"{more_logs[0]}: it goes with --from FILE...")
    for way, names in _OF_WAYS.items():
        if not ways[way]:
            refuse_given(names, f"goes with {way}")
    if ways["--scenario"]:
        refuse_given(["output"], "goes with --engine or --from")
    if check and (engine != "distributed" or device == "cuda"):
        raise UserError("--check: it goes with --engine distributed, on CPUs")
    if logs:
        return cluster_from_logs([*logs, *more_logs], extends, output)
    if engine is not None:
        from spbench.bench.tools.calibrate.machine_report import MachineRequest, measured_machine

        asked = MachineRequest(engine, "cpu" if check else device, world_size, precision, sizes)
        if check is not None:
            from spbench.bench.tools.calibrate.closed_loop import checked_machine

            return checked_machine(asked, check, output)
        return measured_machine(asked, output)
    if scenario is None or table is None or not fits:
        raise UserError("--scenario, --table and --fit go together")
    from spbench.bench.tools.calibrate.fit import fitted_to_published

    return fitted_to_published(scenario, table, quantity, fits)
