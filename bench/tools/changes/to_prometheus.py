"""Prometheus: OpenMetrics text 1.0, for a node exporter's textfile collector or a push gateway.

A gauge for each metric, with the suite, the cell and what it is of as labels.
"""

from __future__ import annotations

from collections import defaultdict

from spbench.bench.tools.changes.exported import Exported, ExportedValue, ExportRequest


def export(request: ExportRequest) -> Exported:
    """One file; samples of a metric are together, as the format asks.

    Raises:
        UserError: no cell has a value.
    """
    samples: dict[str, list[str]] = defaultdict(list)
    for value in request.values():
        name = f"spbench_{value.reading.metric.name}"
        samples[name].append(f"{name}{{{_labels(value)}}} {value.number}")
    blocks = (f"# TYPE {name} gauge\n" + "\n".join(lines) for name, lines in samples.items())
    return Exported("\n".join([*blocks, "# EOF\n"]), request.left_out())


def _labels(value: ExportedValue) -> str:
    cell = value.row["cell"]
    labels = {"suite": value.suite.name, "cell": value.row["key"], "unit": value.reading.unit}
    labels |= {name: str(cell.get(name) or "") for name in ("model", "strategy", "cluster", "engine")}
    for old, new in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
        labels = {name: text.replace(old, new) for name, text in labels.items()}
    return ",".join(f'{name}="{text}"' for name, text in labels.items())
