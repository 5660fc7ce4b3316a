"""Whether a cell fits, and by how much: what the measurement of :func:`examine` says in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.engines.usable_memory import exchange_memory_bytes
from spbench.bench.fit.answers import FIT

_GIB = 2**30


@dataclass(frozen=True)
class Verdict:
    """What is known of a cell that was examined.

    Attributes:
        measurement: of :func:`examine`, as rows have it.
    """

    cell: Cell
    measurement: Mapping[str, Any]

    @property
    def anatomy(self) -> Mapping[str, Any]:
        """As :class:`Anatomy`, of the ranks that are closest to not fitting, or furthest beyond."""
        found: Mapping[str, Any] = self.measurement["meters"][FIT]
        return found

    @property
    def fits(self) -> bool:
        """Whether all ranks fit, in set-up and in each step, on their devices and on their hosts."""
        return self.devices_fit and self.measurement["status"] != "oom"

    @property
    def devices_fit(self) -> bool:
        """Whether all ranks fit their devices."""
        return all(entry["status"] == "ok" for entry in self.measurement["by_class"])

    @property
    def usable_bytes(self) -> int:
        """Of a card, without the CUDA context."""
        found: int = self.measurement["usable_memory_bytes"]
        return found

    @property
    def needed_bytes(self) -> int:
        """Usable bytes of the smallest card on which the fullest ranks fit."""
        found: int = self.anatomy["least_usable_bytes"]
        return found

    @property
    def setup_alone(self) -> bool:
        """Whether the steps would fit, and set-up does not."""
        return {entry["step"] for entry in self.measurement["by_class"] if entry["status"] != "ok"} == {0}

    @property
    def where(self) -> str:
        """The fullest ranks, their pipeline stage, and when, in words."""
        stage = self.anatomy["stage"]
        at = "" if stage is None else f"stage {stage}, "
        return f"{ranks_text(self.anatomy['ranks'])} ({at}{moment_text(self.anatomy['moment'])})"

    def __str__(self) -> str:
        """The first line of an answer."""
        usable, spare = gib(self.usable_bytes), self.usable_bytes - self.needed_bytes
        if self.fits:
            return f"fits: yes, {gib(max(0, spare))} GiB of {usable} to spare on the fullest, {self.where}"
        if self.devices_fit:
            return f"fits: no, {self.measurement['reason']}"
        setup = "the steps fit, set-up does not: " if self.setup_alone else ""
        needed = f"{gib(self.needed_bytes)} of {usable} GiB are needed on {self.where}"
        return f"fits: no, {setup}{gib(max(0, -spare))} GiB are missing, {needed}"

    def nvidia_smi(self) -> dict[str, Any]:
        """What nvidia-smi would show on the fullest ranks: ``reserved_bytes`` by PyTorch, ``context_bytes``
        of CUDA with their ``context_source``, and ``nccl_bytes`` of all-to-alls; None: not known."""
        context = load_cluster(self.cell.cluster).device.memory_context_bytes
        return {
            "reserved_bytes": min(self.anatomy["reserved_memory_bytes"], self.usable_bytes),
            "context_bytes": context.value,
            "context_source": context.source,
            "nccl_bytes": exchange_memory_bytes(self.cell),
        }

    def on_host(self) -> str:
        """A line on what ranks hold in the memory of their hosts; "" where they hold nothing."""
        node = self.measurement.get("node_host_memory_bytes")
        if not node:
            return ""
        total = load_cluster(self.cell.cluster).host_memory.total_bytes.value
        has = "has no limit that is known" if total is None else f"has {gib(total)} GiB"
        most = gib(self.measurement["peak_host_memory_bytes"])
        return f"on the host: {most} GiB of a rank, {gib(node)} GiB of the ranks of a node, which {has}"

    def record(self) -> dict[str, Any]:
        """The answer in a line, for programs."""
        anatomy = self.anatomy
        moment = anatomy["moment"]
        return {
            "cell": self.cell.key,
            "fits": self.fits,
            "spare_bytes": self.usable_bytes - self.needed_bytes,
            "usable_bytes": self.usable_bytes,
            "needed_bytes": self.needed_bytes,
            "peak_memory_bytes": anatomy["peak_memory_bytes"],
            "reserved_memory_bytes": anatomy["reserved_memory_bytes"],
            "node_host_memory_bytes": self.measurement.get("node_host_memory_bytes"),
            "ranks": ranks_text(anatomy["ranks"]).removeprefix("ranks ").removeprefix("rank "),
            "stage": anatomy["stage"],
            "step": moment["step"],
            "phase": moment["phase"],
            "micro_batch": moment["micro_batch"],
            "module": moment["module"],
            "step_time_s": self.measurement["step_time_s"],
            "reason": self.measurement["reason"],
        }


def gib(nbytes: float) -> str:
    """Bytes as GiB: one digit after the point, two below 10, three significant ones below 1."""
    value = nbytes / _GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def moment_text(moment: Mapping[str, Any]) -> str:
    """A :class:`Moment` in words."""
    words = f"step {moment['step']}, {moment['phase']}" if moment["step"] else str(moment["phase"])
    if moment["micro_batches"] > 1:
        words += f" {moment['micro_batch']} of {moment['micro_batches']}"
    return words + (f", in {moment['module']}" if moment["module"] else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as "ranks 0-7, 16-23", "ranks 0, 8, ..., 56" or "rank 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > 4:
        texts = [*texts[:2], "...", texts[-1]]
    return f"ranks {', '.join(texts)}"
