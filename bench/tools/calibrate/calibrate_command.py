"""`spbench calibrate`: fit a cluster's scalars to published step times, measure a machine, or read logs."""

from __future__ import annotations

from pathlib import Path

import click

from spbench.bench.command_line.options import WORDS, WholeNumber, body, many, numbers, path_option, printed


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
@body("calibrate.ways:calibrated")
def command() -> None:
    """Fit or measure the rates of a cluster.

    Fit a cluster's few scalars to published throughputs, and show every row's error (--scenario, --table,
    --fit), measure this machine (--engine), or read what benchmarks wrote (--from FILE...). The latter two
    write a cluster file for --cluster."""
