"""Measuring this machine for `spbench calibrate --engine`: its cluster file, samples, plots and tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.errors import UserError
from spbench.bench.files import csv_text, write_whole
from spbench.bench.measure import Cluster, check_known, provenance
from spbench.bench.tools.calibrate.compute_rates import RatePoint, RateSweep
from spbench.bench.tools.calibrate.fit import TABLES
from spbench.bench.tools.calibrate.measured_cluster import Machine, cluster_of, measure_machine
from spbench.bench.tools.calibrate.operator_times import INSIDE_STEPS, LADDER
from spbench.bench.yaml_text import Dumper, dump
from spbench.impls import PRECISIONS
from spbench.plots.rates import draw_machine_rates


class _Dumper(Dumper):
    """A YAML dumper that writes a list of numbers, or of lists of numbers, in one line."""

    def represent_numbers(self, items: list[Any]) -> yaml.Node:
        flow = not any(isinstance(item, Mapping | str) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Dumper.add_representer(list, _Dumper.represent_numbers)


def cluster_yaml(cluster: Cluster, heading: str) -> str:
    """The text of a cluster's file, with a comment at the top and a line for each measured rate;
    :func:`load_cluster` reads the same cluster from the file."""
    plain = cluster.model_dump(mode="json", exclude_unset=True, exclude={"name", "measured"})
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    text = comment + dump(plain, dumper=_Dumper, width=110)
    rates = [rate.model_dump(mode="json", exclude_none=True) for rate in cluster.measured]
    lines = [dump(rate, flow=True, width=1000).strip() for rate in rates]
    return "\n".join([text + "\nmeasured:", *(f"  - {line}" for line in lines)]) + "\n"


def _about(point: RatePoint) -> dict[str, Any]:
    """The fields of a point by name, without the samples."""
    return {key: value for key, value in asdict(point).items() if key != "samples_s"}


def sample_rows(points: Sequence[RatePoint]) -> list[dict[str, Any]]:
    """A row for each sample of each point, for a CSV file."""
    return [
        {**_about(point), "sample": i, "seconds": s}
        for point in points
        for i, s in enumerate(point.samples_s)
    ]


@dataclass(frozen=True)
class MachineRequest:
    """A user's request to measure this machine; empty ``sizes`` and ``precisions`` mean the defaults.

    Attributes:
        device: "cpu" or "cuda"; None: "cuda" if torch sees a GPU, else "cpu".
        sizes: values of fields of :class:`RateSweep`, by the field's name.
    """

    engine: str
    device: str | None
    world_size: int | None
    precisions: tuple[str, ...]
    sizes: Mapping[str, tuple[int, ...]]

    @property
    def given(self) -> dict[str, tuple[int, ...]]:
        """The user's sizes by field, in ascending order, without empty ones."""
        return {name: tuple(sorted(values)) for name, values in self.sizes.items() if values}

    @property
    def command(self) -> str:
        """The command line that repeats the measurement."""
        words = [f"spbench calibrate --engine {self.engine} --device {self.device}"]
        words += [f"--world-size {self.world_size}"] * (self.world_size is not None)
        words += [f"--precision {','.join(self.precisions)}"] * bool(self.precisions)
        for name, values in self.given.items():
            words.append(f"--{name.replace('_', '-')} {','.join(map(str, values))}")
        return " ".join(words)


def measured_machine(asked: MachineRequest, output: Path) -> Output:
    """Measure this machine, and write the cluster file ``output``, a file of samples (.csv), and plots.

    Raises:
        UserError: a precision is unknown, torch sees no such device, or a file cannot be written.
    """
    if output.suffix not in (".yaml", ".yml"):
        output = output.with_name(f"{output.name}.yaml")
    device = asked.device or ("cuda" if torch.cuda.device_count() else "cpu")
    asked = replace(asked, device=device)
    world, sweep = _world(asked), _sweep(asked)
    message(f"measuring {world} rank{'s' * (world > 1)} on {device}; let the machine do nothing else")
    machine = measure_machine(world, sweep, device)
    about = provenance()
    day = datetime.now(UTC).date().isoformat()
    source = (
        f"measured on {about['host']} on {day}, torch {about['torch']}, {world} ranks at once on "
        f"{device}: {asked.command}"
    )
    cluster = cluster_of(machine, output.stem, source)
    heading = f"{asked.command}\nsamples: {output.with_suffix('.csv').name}; spbench {about['commit']}"
    samples = sample_rows(machine.points)
    files = [write_whole(output, cluster_yaml(cluster, heading))]
    files.append(write_whole(output.with_suffix(".csv"), csv_text(list(samples[0]), samples)))
    # rates inside steps have no plots: the cluster file has their figures, and the samples have their points
    machine = replace(machine, points=[p for p in machine.points if not p.operation.startswith(INSIDE_STEPS)])
    rates = [_rate(point) for point in machine.points]
    title = f"{machine.device_name} ({about['host']}, {day})"
    files += draw_machine_rates(rates, title, output)
    wrong = [point for point in machine.points if point.wrong]
    return Output(
        [*_tables(cluster, machine)],
        {"cluster": cluster.model_dump(mode="json"), "rates": rates},
        rates,
        notes=[
            *_remarks(machine, wrong),
            f"to simulate on it: spbench run --scenario NAME --cluster {output}",
        ],
        files=files,
        code=int(bool(wrong)),
    )


def _world(asked: MachineRequest) -> int:
    gpus = torch.cuda.device_count() if asked.device == "cuda" else 0
    if asked.device == "cuda" and not gpus:
        raise UserError("--device cuda: torch sees no GPU; `spbench doctor --check cuda` says why")
    if asked.engine == "emulated":
        if asked.world_size not in (None, 1):
            raise UserError("--engine emulated measures one device: leave --world-size out")
        return 1
    return asked.world_size or gpus or 2


def _sweep(asked: MachineRequest) -> RateSweep:
    check_known("precision", asked.precisions, list(PRECISIONS))
    given: dict[str, Any] = dict(asked.given)
    if asked.precisions:
        given["precisions"] = asked.precisions
    return RateSweep.of_gpus(**given) if asked.device == "cuda" else RateSweep(steps=LADDER, **given)


def _rate(point: RatePoint) -> dict[str, Any]:
    derived = ("seconds", "flops_per_s", "bytes_per_s", "bus_bytes_per_s")
    bounds = {"least_s": min(point.samples_s), "most_s": max(point.samples_s)}
    return _about(point) | {name: getattr(point, name) for name in derived} | bounds


def _tables(cluster: Cluster, machine: Machine) -> Iterator[Table]:
    """The tables of the cluster's figures, of each rank's rates and, for several ranks, of collectives."""
    collectives = [point for point in machine.points if point.bus_factor]
    others = [point for point in machine.points if not point.bus_factor]
    figures = [{"name": name, "figure": figure} for name, figure in cluster.sourced]
    yield TABLES.table("figures", f"The cluster {cluster.name}: {cluster.device.name}", figures)
    yield TABLES.table("rates", "Rates of one rank, all at once: medians", others)
    if collectives:
        title = f"Collectives on {machine.ranks} ranks, as nccl-tests counts"
        yield TABLES.table("collectives", title, collectives)


def _remarks(machine: Machine, wrong: Sequence[RatePoint]) -> list[str]:
    notes = []
    if wrong:
        which = ", ".join(f"{point.operation} of {point.size}" for point in wrong)
        notes.append(f"WRONG results: {which}; do not trust this machine")
    unsteady = sum(max(each.samples_s) >= 1.5 * min(each.samples_s) for each in machine.points)
    if unsteady:
        notes.append(
            f"of {unsteady} of {len(machine.points)} points a sample took half as long again as another: "
            "was the machine busy?"
        )
    return notes
