"""Prometheus: its text format, which a node exporter's textfile collector reads."""

import spbench


def export(request):
    """A sample for each cell and metric."""
    lines = [
        f'spbench_{metric.name}{{suite="{value.suite.name}",cell="{value.row["key"]}"}} {value.number}'
        for value in request.values()
        for metric in [value.reading.metric]
    ]
    return spbench.Exported("\n".join(lines) + "\n", request.left_out())
