"""Selectors of our numbers for comparison with published ones: a cell of a scenario, named by its particular
settings, and a field of the cell's measurement, for a rank, a step and a phase."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from spbench.bench.cell import Cell, strategy_axes
from spbench.bench.errors import suggestion
from spbench.bench.measure import rank_classes
from spbench.bench.measurement import Measurement
from spbench.bench.setting_values import Count
from spbench.bench.yaml_files import StrictModel, finite
from spbench.impls import FOLDED_AXES, MESH_AXES, backend_defaults, check_axis_names, ranks_along, whole_mesh

#: fields of a measurement that are one number
QUANTITIES = (
    *("answer", "peak_memory_bytes", "reserved_memory_bytes"),
    *("step_time_s", "tokens_per_s", "samples_per_s", "mfu"),
)
assert Measurement.model_fields.keys() >= set(QUANTITIES)
#: (key path, what is wrong there and how to mend it)
Mistake = tuple[Sequence[str | int], str]
#: fields of a cell, and with a dot and a name the options of SECTIONS. ``parallel`` is the ranks along the
#: strategy's own axes, ``world`` all ranks, ``micro_batch`` the samples of one micro-batch of a replica
FIELDS = (
    *("model", "strategy", "batch", "micro_batch", "seq_len", "precision", "cluster", "engine"),
    *("parallel", "world"),
    *(*MESH_AXES, *FOLDED_AXES),
)
SECTIONS = ("model_options", "strategy_options", "training")


def is_option(field: str) -> bool:
    """Whether a field is an option of one of SECTIONS, as model_options.layers is."""
    section, _, option = field.partition(".")
    return bool(option) and section in SECTIONS


def field_value(cell: Cell, field: str) -> Any:
    """A field of a cell as FIELDS and SECTIONS name it; None for an option that the cell does not set."""
    if field == "parallel":
        return ranks_along(strategy_axes(cell.strategy), cell.sizes.by_axis)
    if field == "world":
        return cell.sizes.world
    if field == "micro_batch":
        parts = cell.sizes.dp * cell.training.micro_batches
        return None if cell.batch is None else cell.batch / parts
    if field in (*MESH_AXES, *FOLDED_AXES):
        return cell.sizes.by_axis.get(field, 1)
    section, _, option = field.partition(".")
    value = getattr(cell, section)
    if not option:
        return value
    return value.get(option) if isinstance(value, Mapping) else getattr(value, option, None)


class Selector(StrictModel):
    """Names one cell of a scenario by some of its settings; all other settings may have any value.

    ``mesh`` is the order of the named axes that have more than one rank; other axes do not matter.
    """

    model: str | None = None
    strategy: str | None = None
    world: PositiveInt | None = None
    sizes: dict[str, PositiveInt] = {}
    mesh: list[str] | None = None
    batch: Count | None = None
    seq_len: Count | None = None
    precision: str | None = None
    model_options: dict[str, Any] = {}
    strategy_options: dict[str, Any] = {}
    training: dict[str, Any] = {}

    @field_validator("sizes", "mesh")
    @classmethod
    def _check_axes(cls, axes: Any) -> Any:
        if axes is not None:
            check_axis_names([axis for axis in axes if axis not in FOLDED_AXES])
        return axes

    def fields(self) -> dict[str, Any]:
        """The values that the selector asks for, by FIELDS and options of SECTIONS, without the mesh."""
        simple = ("model", "strategy", "world", "batch", "seq_len", "precision")
        wanted = {name: value for name in simple if (value := getattr(self, name)) is not None}
        options = {f"{s}.{name}": value for s in SECTIONS for name, value in getattr(self, s).items()}
        return wanted | self.sizes | options

    def select(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells among ``cells`` that this selector names, in their order."""
        wanted = self.fields()
        return [cell for cell in cells if has_fields(cell, wanted) and self._has_order(cell)]

    def _has_order(self, cell: Cell) -> bool:
        split = [axis for axis, size in whole_mesh(cell.mesh_sizes).items() if size > 1]
        return self.mesh is None or [axis for axis in self.mesh if axis in split] == split

    def unclear(self, cells: Sequence[Cell]) -> Iterator[str]:
        """A message if the selector does not name exactly one cell on each cluster and engine."""
        selected = self.select(cells)
        if not selected:
            yield f"no group declares a cell with {self}"
        elif not is_one(selected):
            yield (
                f"selects {len(selected)} cells, such as {selected[0].key} and {selected[1].key}; "
                "add a key that tells them apart"
            )

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.model_dump(exclude_defaults=True).items())


def has_fields(cell: Cell, wanted: Mapping[str, Any]) -> bool:
    """Whether the fields of a cell have these values; unset options have the defaults of the backend."""
    unset = {f"training.{name}": value for name, value in backend_defaults(cell.training.backend).items()}
    return all(
        value in (own := field_value(cell, field), unset.get(field) if own is None else own)
        for field, value in wanted.items()
    )


def is_one(cells: Sequence[Cell]) -> bool:
    """Whether no two of the cells have the same cluster and engine."""
    return len({(cell.cluster, cell.engine) for cell in cells}) == len(cells)


# -- columns of published numbers ----------------------------------------------------------------------------

#: fields of the entries of :attr:`Measurement.by_class`
CLASS_QUANTITIES = ("peak_memory_bytes", "reserved_memory_bytes", "allocated_bytes")
#: the fields that CUDA's allocator counts from the start of the process on, and not for one step
PEAKS = CLASS_QUANTITIES[:2]
#: by field, the name in an entry's ``phase_ends`` of its value at the end of a phase
AT_PHASE_ENDS = {"allocated_bytes": "allocated", "reserved_memory_bytes": "reserved"}

#: the rank that a number describes; None: the whole run
RankName = int | Literal["last"] | None


class PublishedRow(NamedTuple):
    """A row of a published file.

    Attributes:
        line: number of the row in its file, the first below the header being 1.
        text: the text of each column; "" for none.
    """

    line: int
    text: Mapping[str, str]

    def value(self, column: str) -> float | None:
        """The number in a column, or None if none was published; ValueError for any other text and for
        negative numbers."""
        text = self.text[column].strip()
        return _amount(text) if text else None


def _amount(text: str) -> float:
    if (number := finite(text)) < 0:
        raise ValueError(f"{text} is less than nothing")
    return number


class QuantityColumn(StrictModel):
    """A column of published numbers, and our number for it: ``field`` divided by ``unit``.

    Attributes:
        field: a field of the measurement; with ``rank`` or ``step``, a field of an entry of its ``by_class``.
        unit: the unit of the compared numbers, in units of the field.
        published_unit: the unit of the published column, if that is not ``unit``.
        rank: the rank that the number describes; "each": the column has a JSON object of numbers by rank.
        step: the traced step, counted from 1; with a rank or a phase the last step is the default.
        phase: the number describes the end of the step's last phase of this name, such as "forward".
        named: the quantity's name in comparisons, ``as`` in the file; default: the column's name.
        note: a note on every number of the column.
    """

    field: str
    unit: PositiveFloat = 1.0
    published_unit: PositiveFloat | None = None
    rank: NonNegativeInt | Literal["last", "each"] | None = None
    step: PositiveInt | Literal["first", "last"] | None = None
    phase: str | None = None
    named: str = Field("", alias="as")
    note: str = ""

    @property
    def of_classes(self) -> bool:
        """Whether the number describes one rank, step or end of a phase, not the whole measurement."""
        return self.rank is not None or self.step is not None or self.phase is not None

    def numbers(self, row: PublishedRow, column: str) -> dict[RankName, float | None]:
        """The published numbers in a row by rank, in the compared unit, None where nothing was published;
        ValueError for any other text and for negative numbers."""
        numbers: dict[RankName, float | None]
        if self.rank == "each":
            text = row.text[column].strip()
            content = json.loads(text, parse_int=str, parse_float=str, parse_constant=str) if text else {}
            if not isinstance(content, dict) or not all(isinstance(each, str) for each in content.values()):
                raise ValueError(f"no object of a number for each rank: {text}")
            numbers = {int(rank): _amount(each) for rank, each in content.items()}
        else:
            numbers = {self.rank: row.value(column)}
        scale = (self.published_unit or self.unit) / self.unit
        return {rank: None if number is None else number * scale for rank, number in numbers.items()}

    def words(self, rank: RankName) -> list[str]:
        """The rank and the step of a number as texts, such as "last rank", "step 2"."""
        named = ((rank, "rank"), (self.step, "step"), (self.phase and "end of", self.phase))
        texts = [(f"{what} {at}" if isinstance(at, int) else f"{at} {what}", at) for at, what in named]
        return [text for text, at in texts if at is not None]

    def ours(self, measurement: Mapping[str, Any], cell: Cell, rank: RankName) -> float | None:
        """Our number in the compared unit; None if the measurement has no such number."""
        value = self._of_classes(measurement, cell, rank) if self.of_classes else measurement.get(self.field)
        return None if value is None else value / self.unit

    def measured(self, ours: float) -> float:
        """The number of the measurement's field for ``ours`` in the compared unit; bytes are whole."""
        value = ours * self.unit
        return round(value) if self.field.endswith("_bytes") else value

    def _of_classes(self, measurement: Mapping[str, Any], cell: Cell, rank: RankName) -> Any:
        """The field's largest value over rank classes at the step (a peak: up to that step), or the value in
        the class of one rank; None if there is no such entry."""
        entries = [entry for entry in measurement.get("by_class") or [] if entry["step"]]  # 0 is set-up
        if rank is not None:
            rank = cell.sizes.world - 1 if rank == "last" else rank
            first = next((each.first for each in rank_classes(cell) if rank in each.ranks), None)
            entries = [entry for entry in entries if entry["rank"] == first]
        steps = sorted({entry["step"] for entry in entries})
        if not steps:
            return None
        wanted = self.step if isinstance(self.step, int) else steps[0 if self.step == "first" else -1]
        if wanted not in steps:
            return None
        if self.phase is not None:
            ends = [entry["phase_ends"].get(self.phase) for entry in entries if entry["step"] == wanted]
            return max((end[AT_PHASE_ENDS[self.field]] for end in ends if end), default=None)
        earliest = steps[0] if self.field in PEAKS else wanted
        return max(entry[self.field] for entry in entries if earliest <= entry["step"] <= wanted)

    def mistakes(self) -> Iterator[Mistake]:
        """Mistakes in this column's entry, as (key path, message)."""
        known: Collection[str] = CLASS_QUANTITIES if self.of_classes else QUANTITIES
        known = known if self.phase is None else tuple(AT_PHASE_ENDS)
        yield from unknown(["field"], "unknown quantity", self.field, known)


def unknown(path: Sequence[str | int], what: str, name: str, known: Collection[str]) -> Iterator[Mistake]:
    """A mistake at a key path if ``name`` is not one of ``known``, with near names; ``what``: the words
    before the name."""
    if name not in known:
        yield path, f"{what} {name!r}{suggestion(name, known)}"
