"""A command: the largest peak of each strategy in results."""

import click

import spbench


@click.command
@click.argument("results")
@spbench.printed
def command(results):
    """Show the largest peak memory of each strategy in RESULTS."""
    largest = spbench.read_results(results).groupby("strategy")["peak_memory_bytes"].max().dropna()
    lines = [{"strategy": name, "peak_memory_bytes": int(peak)} for name, peak in largest.items()]
    return spbench.Output([spbench.Table("Largest peak of each strategy", lines)], lines, lines)
