"""Whether a cell fits, and by how much, in numbers and words: the verdict on the measurement of a cell or of
a changed cell. Modules have the names of the job's own program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, groupby
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.tools.choose.anatomy import ANATOMY, Anatomy
from spbench.bench.tools.choose.suggestions import Change
from spbench.impls import model_preset

_ANATOMY = TypeAdapter(Anatomy)
#: the words, records and tables of answers, and the names of modules by the kind of job
TABLES = RecordForms(Path(__file__).with_name("words.yaml"))
#: the kind of job whose names of modules are used if a kind has none of its own
_USUAL = "huggingface"


def has_experts(cell: Cell) -> bool:
    """Whether the model of a cell has routed experts."""
    return bool(getattr(model_preset(*cell.model_arguments), "experts", 0))


@dataclass(frozen=True)
class CardMemory:
    """The bytes of a card, and the bytes of it that a rank needs.

    Attributes:
        card_bytes: all of the card's memory.
        tensors_bytes: the least that PyTorch's allocator must reserve to serve the rank.
        context_bytes: bytes of the CUDA context; None: unknown, and counted as 0.
        nccl_bytes: bytes of NCCL's buffers for all-to-alls; None: unknown, and counted as 0.
    """

    card_bytes: int
    tensors_bytes: int
    context_bytes: int | None
    nccl_bytes: int | None

    @property
    def outside_bytes(self) -> int:
        """Known bytes of the card that are taken outside PyTorch's allocator."""
        return (self.context_bytes or 0) + (self.nccl_bytes or 0)

    @property
    def total_bytes(self) -> int:
        """Bytes that a card must have for the cell to fit."""
        return self.tensors_bytes + self.outside_bytes

    @property
    def spare_bytes(self) -> int:
        """The card's bytes minus :attr:`total_bytes`; negative if bytes are missing."""
        return self.card_bytes - self.total_bytes


@dataclass(frozen=True)
class Verdict:
    """The verdict on a cell that :func:`examine` or :func:`attempt` has measured.

    Attributes:
        measurement: the measurement as a mapping, as in a row.
        change: the change that was made to the user's cell; None: none.
    """

    cell: Cell
    measurement: Mapping[str, Any]
    change: Change | None = None

    @cached_property
    def cluster(self) -> measure.Cluster:
        """The cluster of the cell."""
        return measure.load_cluster(self.cell.cluster)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The memory of the class of ranks that needs the largest card."""
        return _ANATOMY.validate_python(self.measurement["meters"][ANATOMY])

    @property
    def fits(self) -> bool:
        """Whether all ranks fit, in set-up and in each step, on their devices and on their hosts."""
        return self.devices_fit and self.measurement["status"] != "oom"

    @property
    def devices_fit(self) -> bool:
        """Whether all ranks fit their devices."""
        return all(entry["status"] == "ok" for entry in self.measurement.get("by_class", ()))

    def within(self, budget_bytes: int) -> bool:
        """Whether the cell needs at most ``budget_bytes`` of a card, and its hosts have enough memory."""
        on_host = self.devices_fit and not self.fits
        return self.memory.total_bytes <= budget_bytes and not on_host

    @cached_property
    def memory(self) -> CardMemory:
        """The card's bytes and those that the fullest ranks need, or a guess if not all layers were
        traced."""
        of_allocator = (self.measurement.get("meters") or {}).get(ANATOMY, {})
        needed = of_allocator.get("least_usable_bytes") or self.measurement["peak_memory_bytes"]
        context: int | None = self.cluster.device.memory_context_bytes.value
        nccl = measure.exchange_memory_bytes(self.cell)
        usable: int = self.measurement["usable_memory_bytes"]
        return CardMemory(usable + (context or 0) + (nccl or 0), needed, context, nccl)

    @property
    def banded(self) -> Mapping[str, Any]:
        """The measurement with the interval of its step time."""
        row = {"cell": self.cell.model_dump(), "measurement": self.measurement}
        measurement: Mapping[str, Any] = measure.with_band(row)["measurement"]
        return measurement

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None: the cell cannot be timed."""
        return self.measurement.get("step_time_s")

    def price(self, before: Self) -> float | None:
        """The step time divided by that of ``before``, without the change; None: one has no time."""
        return self.step_s / before.step_s if self.step_s and before.step_s else None

    @property
    def settings(self) -> str:
        """The change in the words of ``--set``; "" if there is no change."""
        return measure.written(self.change.settings) if self.change else ""

    def where_in(self, program: str = "") -> str:
        """In words: the fullest ranks, their pipeline stage, and the moment; see :meth:`moment_in`."""
        at = "" if self.anatomy.stage is None else f"stage {self.anatomy.stage}, "
        return f"{ranks_text(self.anatomy.ranks)} ({at}{self.moment_in(program)})"

    def moment_in(self, program: str = "") -> str:
        """In words, the moment at which memory is largest; its module has the name in ``program``."""
        moment = self.anatomy.moment
        return str(replace(moment, module=moment.module and in_program_words(moment.module, program)))

    @cached_property
    def certainty(self) -> measure.Certainty:
        """Whether the cell fits, and how sure that is."""
        return (self.fits and measure.certainty(self.cell, self.measurement)) or measure.Certainty(
            "fits" if self.fits else "no"
        )

    def __str__(self) -> str:
        """The first line of an answer: yes, tight or no, and by how much."""
        return TABLES.text("fits", self)

    def peak_parts(self, program: str = "") -> list[dict[str, Any]]:
        """The parts of the peak, the largest first: its ``kind``, in words ``place``, where it was allocated,
        in the names of a program, ``of`` the part of a layer with experts, ``bytes``, ``tensors`` and
        ``share`` of the peak."""
        words = partial(in_program_words, program=program)
        about = {"peak": self.anatomy.peak_memory_bytes, "experts": has_experts(self.cell)}
        return TABLES.records("part", self.anatomy.parts, words=words, **about)

    @property
    def shown_by_nvidia_smi(self) -> int:
        """Bytes that nvidia-smi would show for the fullest ranks, as far as they are known."""
        reserved = min(self.anatomy.reserved_memory_bytes, self.measurement["usable_memory_bytes"])
        return int(reserved) + self.memory.outside_bytes


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


def in_program_words(module: str, program: str) -> str:
    """The name that a program gives to a module.

    Args:
        module: its path in spbench's model, such as ``blocks.*.mlp``; a class name: the decoder itself.
        program: the kind of job; "": no job.
    """
    programs = TABLES.forms["modules"]
    names = {**programs.get(program, programs[_USUAL]), "loader_mask": "the data loader's attention mask"}
    if "Decoder" in module:
        return str(names[""])
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (path := ".".join(parts[:end])) in names:
            return str(names[path])
    return module
