"""`spbench calibrate`: fit a cluster's scalars to published step times, measure a machine, or read logs."""

from pathlib import Path

import click

from spbench.bench.command_line.options import WORDS, WholeNumber, body, many, numbers, path_option, printed


@click.command("calibrate")
@click.option("--scenario", help="A scenario with a published table: its name or its file.")
@click.option("--table", help="The table's name in the scenario.")
@click.option("--quantity", default="throughput_tokens_per_s", show_default=True, help="The table's column.")
@click.option(
    "--fit",
    "fits",
    multiple=True,
    metavar="SCALAR:COLUMN=VALUE[,...]",
    help="Fit a scalar to the rows that have these values; fits run in the order of the options.",
)
@click.option(
    "--engine",
    type=click.Choice(["distributed", "emulated"]),
    help="Measure this machine: real ranks with their collectives, or one device without links.",
)
@click.option(
    "--check",
    metavar="SCENARIO",
    help="With --engine distributed, on CPUs: also measure this scenario's cells, such as closed_loop's, "
    "and predict them by the measured rates. Writes a file for each number of ranks.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Device of the ranks' tensors; by default cuda if torch sees a GPU, else cpu.",
)
@click.option("--world-size", type=WholeNumber(min=1), help="Number of ranks; by default 2, or all GPUs.")
@many(
    "--precision", WORDS, "Precisions of matmuls and attention; by default fp32, on GPUs bf16, fp16 and fp32."
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
    "--extends", metavar="CLUSTER", help="With --from: the packaged cluster that supplies all other rates."
)
@path_option(
    "--output",
    "The file of the cluster that --engine or --from writes, next to samples and plots.",
    default="measured.yaml",
    show_default=True,
)
@printed
@body("calibrate.ways:calibrated")
def command() -> None:
    """Fit or measure the rates of a cluster.

    The command fits a cluster's few scalars to published throughputs and shows every row's error (--scenario,
    --table, --fit), measures this machine (--engine), or reads logs of benchmarks (--from FILE...). The
    latter two write a cluster file for --cluster."""
