"""`spbench calibrate --from`: a cluster's file from logs of benchmarks and profilers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spbench.bench.atomic_write import write_whole
from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError, suggestion
from spbench.bench.measure.clusters.cluster import cluster_names, cluster_of_content, load_cluster
from spbench.bench.tools.calibrate.cluster_of_logs import cluster_of_logs
from spbench.bench.tools.calibrate.log_cluster import LogCluster, heading
from spbench.bench.tools.calibrate.log_findings import findings_of
from spbench.bench.user_files import resolved
from spbench.bench.yaml_text import comment, dump


def cluster_from_logs(logs: Sequence[Path], extends: str | None, output: Path) -> Output:
    """Read the logs and write the cluster's file ``output``; nothing is written if one of them is wrong.

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
    found = {str(path): findings_of(path) for path in dict.fromkeys(logs)}
    made = cluster_of_logs(found, base)
    words = ["spbench calibrate --from", *found, *(["--extends", extends] if extends else [])]
    text = _text(made, " ".join(words))
    cluster_of_content(output, text.encode())  # raises UserError where the file could not be read again
    write_whole(output, text)
    instead = (
        f"what {extends} says is used" if extends else "nothing is timed by them; --extends names a cluster"
    )
    missing = [f"still missing: {'; '.join(made.missing)}: {instead}"] if made.missing else []
    return Output(
        [Table(f"The cluster {output.stem}: what the logs say", made.fitted)],
        {"cluster": made.content, "figures": made.fitted, "missing": made.missing, "remarks": made.remarks},
        made.fitted,
        notes=[
            *made.remarks,
            *missing,
            f"to see it by kind of work: spbench list cluster {output}",
            f"to simulate on it: spbench run --scenario NAME --cluster {output}",
        ],
        files=[output],
    )


def _text(made: LogCluster, command: str) -> str:
    said = "".join(f"{comment(line)}\n" for line in [command, *heading(made)])
    return said + dump(made.content, width=110)
