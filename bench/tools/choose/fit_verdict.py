"""Whether a cell fits, and by how much: the measurement of a cell, as it is or with a change, in numbers and
words, modules in those of the program whose job it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Column
from spbench.bench.command_line.shown_times import shown_band
from spbench.bench.measure import (
    FITS,
    NO,
    Certainty,
    certainty,
    exchange_memory_bytes,
    load_cluster,
    with_band,
    written,
)
from spbench.bench.tools.choose.anatomy import ANATOMY, Anatomy, Part
from spbench.bench.tools.choose.suggestions import Change
from spbench.bench.units import card_gib
from spbench.bench.yaml_files import read_yaml
from spbench.impls import model_preset

_ANATOMY = TypeAdapter(Anatomy)
#: parts of the peak that an answer names in its second line
_LARGEST = 2


@dataclass(frozen=True)
class CardMemory:
    """Bytes of a card and what a rank needs of them.

    Attributes:
        card_bytes: all of the card's memory.
        tensors_bytes: the least that PyTorch's allocator must reserve to serve the rank.
        context_bytes: what the CUDA context takes; None: not known, and counted as none.
        nccl_bytes: what NCCL's buffers for all-to-alls take; None: not known, and counted as none.
    """

    card_bytes: int
    tensors_bytes: int
    context_bytes: int | None
    nccl_bytes: int | None

    @property
    def outside_bytes(self) -> int:
        """Bytes of the card that are known to be taken outside PyTorch's allocator."""
        return (self.context_bytes or 0) + (self.nccl_bytes or 0)

    @property
    def total_bytes(self) -> int:
        """Bytes that a card must have for the cell: the number that decides."""
        return self.tensors_bytes + self.outside_bytes

    @property
    def spare_bytes(self) -> int:
        """What the card has beyond the total; negative: what is missing."""
        return self.card_bytes - self.total_bytes


def card_memory(cell: Cell, measurement: Mapping[str, Any], tensors_bytes: int) -> CardMemory:
    """The memory of a cell's cards beside what one of its ranks needs.

    Args:
        measurement: of the cell on a cluster with a limit; ``usable_memory_bytes`` is what tensors can have.
        tensors_bytes: the least that the allocator must reserve for the rank.
    """
    context: int | None = load_cluster(cell.cluster).device.memory_context_bytes.value
    nccl = exchange_memory_bytes(cell)
    usable: int = measurement["usable_memory_bytes"]
    return CardMemory(usable + (context or 0) + (nccl or 0), tensors_bytes, context, nccl)


@dataclass(frozen=True)
class Verdict:
    """A cell that was measured by :func:`examine` or :func:`attempt`.

    Attributes:
        measurement: as rows have it.
        change: how the cell differs from the one that was asked about; None: it is that cell.
    """

    cell: Cell
    measurement: Mapping[str, Any]
    change: Change | None = None

    @cached_property
    def anatomy(self) -> Anatomy:
        """The memory of the ranks that are closest to not fitting, or furthest beyond."""
        return _ANATOMY.validate_python(self.measurement["meters"][ANATOMY])

    @property
    def fits(self) -> bool:
        """Whether all ranks fit, in set-up and in each step, on their devices and on their hosts."""
        return self.devices_fit and self.measurement["status"] != "oom"

    @property
    def devices_fit(self) -> bool:
        """Whether all ranks fit their devices."""
        return all(entry["status"] == "ok" for entry in self.measurement["by_class"])

    def within(self, budget_bytes: int) -> bool:
        """Whether the cell needs at most so many bytes of a card, and the hosts have the memory for it."""
        on_host = self.devices_fit and not self.fits
        return self.memory.total_bytes <= budget_bytes and not on_host

    @cached_property
    def memory(self) -> CardMemory:
        """What the card has and must have, on the fullest ranks; by the guessed peak, where the cell was not
        traced whole."""
        traced = ANATOMY in (self.measurement.get("meters") or {})
        needed = self.anatomy.least_usable_bytes if traced else self.measurement["peak_memory_bytes"]
        return card_memory(self.cell, self.measurement, needed)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None: it has no time."""
        return self.measurement.get("step_time_s")

    def price(self, before: Verdict) -> float | None:
        """The step time over the time without the change, ``before``; None: one of the two has no time."""
        return self.step_s / before.step_s if self.step_s and before.step_s else None

    def where_in(self, program: str = "") -> str:
        """The fullest ranks, their pipeline stage, and when, in words; modules as a program calls them."""
        at = "" if self.anatomy.stage is None else f"stage {self.anatomy.stage}, "
        return f"{ranks_text(self.anatomy.ranks)} ({at}{self.moment_in(program)})"

    def moment_in(self, program: str = "") -> str:
        """The moment at which memory is largest, its module by the program's name for that module."""
        moment = self.anatomy.moment
        return str(replace(moment, module=moment.module and in_program_words(moment.module, program)))

    @cached_property
    def certainty(self) -> Certainty:
        """Whether the cell fits, and how sure that is."""
        return (self.fits and certainty(self.cell, self.measurement)) or Certainty(FITS if self.fits else NO)

    def __str__(self) -> str:
        """The first line of an answer: yes, tight or no, and by how much."""
        memory = self.memory
        needs = f"(needs {card_gib(memory.total_bytes)} of {card_gib(memory.card_bytes)} GiB)"
        if self.fits:
            return f"fits: {self.certainty.answer}, {card_gib(memory.spare_bytes)} GiB to spare {needs}"
        if self.devices_fit:
            return f"fits: no, {self.measurement['reason']}"
        return f"fits: no, {card_gib(-memory.spare_bytes)} GiB are missing {needs}"

    def peak(self, program: str = "") -> str:
        """The second line: the fullest ranks, when they are, and what holds most of their memory then.

        Args:
            program: the kind of job whose words for modules it has.
        """
        largest = [part for part in self.anatomy.parts if part.kind][:_LARGEST]
        parts = [f"{self.named(part, program)} {card_gib(part.bytes)}" for part in largest]
        too_large = {each["step"] for each in self.measurement["by_class"] if each["status"] != "ok"}
        alone = "the steps fit, set-up does not: " if too_large == {0} and not self.fits else ""
        return f"{alone}on the fullest, {self.where_in(program)}: {', '.join(parts)} GiB"

    def named(self, part: Part, program: str = "") -> str:
        """A part of the peak: its kind, and where it was allocated in the words of a program."""
        kind = part.kind.replace("_", " ")
        experts = bool(getattr(model_preset(*self.cell.model_arguments), "experts", 0))
        of = part_of_experts(part.kind, part.module, experts)
        place = in_program_words(part.module, program) if part.module else ""
        return " of ".join(filter(None, [kind, f"{of} ({place})" if of else place]))

    @property
    def shown_by_nvidia_smi(self) -> int:
        """Bytes that nvidia-smi would show for the fullest ranks, as far as they are known."""
        reserved = min(self.anatomy.reserved_memory_bytes, self.measurement["usable_memory_bytes"])
        return int(reserved) + self.memory.outside_bytes

    def on_host(self) -> str:
        """A line on what ranks hold in the memory of their hosts; "" where they hold nothing."""
        if not (node := self.measurement.get("node_host_memory_bytes")):
            return ""
        total = load_cluster(self.cell.cluster).host_memory.total_bytes.value
        has = "whose memory is unknown" if total is None else f"which has {card_gib(total)} GiB"
        most = card_gib(self.measurement["peak_host_memory_bytes"])
        return f"on the host: {most} GiB per rank, {card_gib(node)} GiB per node, {has}"


def columns(**paths: str) -> list[Column]:
    """Columns for programs: by field, the dotted path of an attribute."""
    return [Column(field, field, of=attrgetter(path)) for field, path in paths.items()]


#: what a card has and must have, for programs
MEMORY_COLUMNS = columns(
    total_bytes="memory.total_bytes", card_bytes="memory.card_bytes", spare_bytes="memory.spare_bytes"
)
#: the answer on a cell in a line, for programs
VERDICT_COLUMNS = [
    *columns(cell="cell.key", fits="fits", verdict="certainty.word", tight_because="certainty.reason"),
    *MEMORY_COLUMNS,
    *columns(
        peak_memory_bytes="anatomy.peak_memory_bytes",
        reserved_memory_bytes="anatomy.reserved_memory_bytes",
        nvidia_smi_bytes="shown_by_nvidia_smi",
    ),
    Column("host", "node_host_memory_bytes", of=lambda v: v.measurement.get("node_host_memory_bytes")),
    Column("ranks", "ranks", of=lambda verdict: ranks_text(verdict.anatomy.ranks).split(" ", 1)[1]),
    *columns(
        stage="anatomy.stage",
        step="anatomy.moment.step",
        phase="anatomy.moment.phase",
        micro_batch="anatomy.moment.micro_batch",
        module="anatomy.moment.module",
        step_time_s="step_s",
    ),
    Column("reason", "reason", of=lambda verdict: verdict.measurement["reason"]),
]


def settings_of(verdict: Verdict) -> str:
    """The change as ``--set`` takes it; "" if there is no change."""
    return written(verdict.change.settings) if verdict.change else ""


def step_of(verdict: Verdict) -> str:
    """The step time of a verdict with its interval, in words; "not timed" without one."""
    row = {"cell": verdict.cell.model_dump(), "measurement": verdict.measurement}
    return shown_band(with_band(row)["measurement"]) or "not timed"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as "ranks 0-7, 16-23", "ranks 0, 8, ..., 56" or "rank 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    places = count()
    runs = [[*run] for _, run in groupby(sorted(ranks), lambda rank: rank - next(places))]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > 4:
        texts = [*texts[:2], "...", texts[-1]]
    return f"ranks {', '.join(texts)}"


#: of jobs whose kind has no words of its own
_USUAL = "huggingface"


@functools.cache
def words() -> Mapping[str, Any]:
    """The words of answers: names of modules by the kind of job, and other tables."""
    return read_yaml(Path(__file__).with_name("words.yaml"))


def in_program_words(module: str, program: str) -> str:
    """The name that a program gives to a module.

    Args:
        module: its path here, as ``blocks.*.mlp``; the name of a class: the decoder itself.
        program: the kind of its job; "" for none.
    """
    programs = words()["modules"]
    names = {**programs.get(program, programs[_USUAL]), "loader_mask": "the data loader's attention mask"}
    if "Decoder" in module:
        return str(names[""])
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (path := ".".join(parts[:end])) in names:
            return str(names[path])
    return module


def part_of_experts(kind: str, module: str, experts: bool) -> str:
    """The part of a layer with experts that a part of a peak belongs to, such as "router"; "" for others.

    Args:
        kind: of memory, as "activations".
        module: in which it was allocated.
        experts: whether the model's feed-forward layers have any.
    """
    if not experts or ".mlp" not in module or module.endswith(("mlp_norm", "mlp_end")):
        return ""
    if ".mlp.router" in module:
        return "router"
    if ".mlp.shared" in module:
        return "shared experts"
    return "dispatch buffers" if kind == "communication_buffers" else "routed experts, dispatch"
