"""`spbench calibrate`'s three ways to a cluster's rates: fit them, measure a machine, or read logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spbench.bench.command_line.options import refuse_given
from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import resolved, write_whole
from spbench.bench.measure import cluster_names, cluster_of_content, load_cluster
from spbench.bench.tools.calibrate.closed_loop import checked_machine
from spbench.bench.tools.calibrate.cluster_of_logs import cluster_of_logs, heading
from spbench.bench.tools.calibrate.fit import fitted_to_published
from spbench.bench.tools.calibrate.log_findings import findings_of
from spbench.bench.tools.calibrate.machine_report import MachineRequest, measured_machine
from spbench.bench.yaml_text import comment, dump

#: by option that chooses a way, the parameters that only this way takes
_OF_WAYS = {
    "--scenario": ("quantity",),
    "--engine": (
        *("device", "world_size", "precision"),
        *("message_bytes", "sides", "lengths"),
    ),
    "--from": ("extends",),
}


def calibrated(
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
    """The output of `spbench calibrate`; the arguments are the options of the command.

    Raises:
        UserError: the options do not go together, or the way that the options choose raises one.
    """
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
        asked = MachineRequest(engine, "cpu" if check else device, world_size, precision, sizes)
        if check is not None:
            return checked_machine(asked, check, output)
        return measured_machine(asked, output)
    if scenario is None or table is None or not fits:
        raise UserError("--scenario, --table and --fit go together")
    return fitted_to_published(scenario, table, quantity, fits)


def cluster_from_logs(logs: Sequence[Path], extends: str | None, output: Path) -> Output:
    """Read the logs and write the cluster's file ``output``; nothing is written if a log is wrong.

    Raises:
        UserError: a log is of no known kind, damaged, or of another card; there is no cluster ``extends``.
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
