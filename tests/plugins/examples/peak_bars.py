"""A figure: the peak memory of each cell, as bars."""

from matplotlib.figure import Figure


def draw(rows, comparison, output):
    """Draw result rows, as in cells.jsonl, into the folder ``output``; returns the paths of the files."""
    peaks = {row["key"]: row["measurement"]["peak_memory_bytes"] or 0 for row in rows}
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(peaks), [peak / 2**20 for peak in peaks.values()])
    axes.set_xlabel("Peak memory, MiB")
    figure.savefig(output / "peak_bars.svg")
    return [output / "peak_bars.svg"]
