"""InfluxDB: its line protocol, which `influx write` and Telegraf read."""

import spbench


def export(request):
    """A point for each cell and metric."""
    lines = [
        f"{value.reading.metric.name},suite={value.suite.name},cell={value.row['key']} value={value.number}"
        for value in request.values()
    ]
    return spbench.Exported("\n".join(lines) + "\n", request.left_out())
