"""Whether a cell fits, and by how much: what the measurement of :func:`examine` says in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.fit.answers import FIT
from spbench.bench.tools.fit.card_memory import CardMemory, card_memory

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
    def memory(self) -> CardMemory:
        """What the card has and must have, on the fullest ranks."""
        return card_memory(self.cell, self.measurement, self.anatomy["least_usable_bytes"])

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
        """The first lines of an answer: yes or no and by how much, and then the fullest ranks."""
        memory = self.memory
        needs = f"(needs {gib(memory.total_bytes)} of {gib(memory.card_bytes)} GiB)"
        at = f"on the fullest, {self.where}"
        if self.fits:
            return f"fits: yes, {gib(memory.spare_bytes)} GiB to spare {needs}\n{at}"
        if self.devices_fit:
            return f"fits: no, {self.measurement['reason']}"
        at = f"the steps fit, set-up does not: {at}" if self.setup_alone else at
        return f"fits: no, {gib(-memory.spare_bytes)} GiB are missing {needs}\n{at}"

    @property
    def shown_by_nvidia_smi(self) -> int:
        """Bytes that nvidia-smi would show for the fullest ranks, as far as they are known."""
        memory = self.memory
        reserved = min(self.anatomy["reserved_memory_bytes"], self.measurement["usable_memory_bytes"])
        return int(reserved) + memory.outside_bytes

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
        anatomy, memory = self.anatomy, self.memory
        moment = anatomy["moment"]
        return {
            "cell": self.cell.key,
            "fits": self.fits,
            **memory.record(),
            "peak_memory_bytes": anatomy["peak_memory_bytes"],
            "reserved_memory_bytes": anatomy["reserved_memory_bytes"],
            "nvidia_smi_bytes": self.shown_by_nvidia_smi,
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
