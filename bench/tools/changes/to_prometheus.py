"""Prometheus: OpenMetrics text 1.0, for a node exporter's textfile collector or a push gateway.

A gauge for each metric, with the suite, the cell and what it is of as labels.
"""

from __future__ import annotations

from spbench.bench.tools.changes.export_command import Exported, ExportedValue, ExportRequest
from spbench.plots.series import grouped


def export(request: ExportRequest) -> Exported:
    """One file; samples of a metric are together, as the format asks.

    Raises:
        UserError: no cell has a value.
    """
    lines = []
    for name, values in grouped(request.values(), lambda v: f"spbench_{v.reading.metric.name}").items():
        lines += [f"# TYPE {name} gauge", *(f"{name}{{{_labels(v)}}} {v.number}" for v in values)]
    return Exported("\n".join([*lines, "# EOF\n"]), request.left_out())


def _labels(value: ExportedValue) -> str:
    cell = value.row["cell"]
    labels = {"suite": value.suite.name, "cell": value.row["key"], "unit": value.reading.unit}
    labels |= {name: str(cell.get(name) or "") for name in ("model", "strategy", "cluster", "engine")}
    for old, new in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
        labels = {name: text.replace(old, new) for name, text in labels.items()}
    return ",".join(f'{name}="{text}"' for name, text in labels.items())
