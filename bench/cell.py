"""A cell, the unit of work, and a measurement, what an engine makes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

from spbench.bench.counts import MOST_POSITIONS, MOST_RANKS, MOST_STEPS, Count, Ranks, Repeats
from spbench.bench.declarations import declared
from spbench.bench.model_files import names_a_file, read_model_file
from spbench.bench.training_options import TrainingOptions
from spbench.bench.yaml_files import StrictModel
from spbench.impls.axes import MESH_AXES, in_order, ranks_along, spelled
from spbench.impls.strategies.nesting import nesting

#: ok, oom and unsupported are results; numerics: a value is not finite or too far off; mismatch: a rank sends
#: other bytes than its strategy's closed form says; failed and timeout: there is no result
Status = Literal["ok", "oom", "unsupported", "failed", "timeout", "numerics", "mismatch"]


class Sizes(StrictModel):
    """Ranks along each axis of the mesh; at most MOST_RANKS in all."""

    dp: Ranks = 1
    pp: Ranks = 1
    cp: Ranks = 1
    tp: Ranks = 1
    sp: Ranks = 1

    @model_validator(mode="after")
    def _check_world(self) -> Sizes:
        if self.world > MOST_RANKS:
            raise ValueError(f"{self} are {self.world} ranks; there can be {MOST_RANKS} at most")
        return self

    @property
    def by_axis(self) -> dict[str, int]:
        """The ranks along every axis, in the default order; see :attr:`Cell.mesh_sizes` for a cell's own."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def world(self) -> int:
        """All ranks."""
        return ranks_along(MESH_AXES, self.by_axis)

    def __str__(self) -> str:
        return spelled(self.by_axis)


@declared
def strategy_axes(strategy: str) -> list[str]:
    """The axes of the strategies of that name; see :func:`nesting`."""
    return list(nesting(strategy).axes)


class SearchRequest(StrictModel):
    """Ask for the largest ``quantity`` that fits, one of :func:`quantities`.

    Values are multiples of ``step`` (a sequence length of ``step`` a rank, where a strategy chunks sequences;
    a batch of ``step`` a micro-batch), up to ``limit``. ``timed``: simulate the time of a step at the answer
    too.
    """

    quantity: str
    step: Count = 1
    limit: Count = 2**22
    timed: bool = False


class Timing(StrictModel):
    """How many steps the distributed engine runs."""

    warmup: int = Field(default=2, ge=0, le=MOST_STEPS)
    samples: Repeats = 5


class Learning(StrictModel):
    """Ask for the losses of a training run on real data instead of a measurement; on real ranks only.

    The learning rate rises linearly to ``learning_rate`` over ``warmup`` steps, then falls linearly to zero
    after the last step. ``seed``: of weights and data. ``deviation``: of the initial matrices.
    """

    steps: Repeats
    learning_rate: PositiveFloat = 1e-3
    warmup: int = Field(default=0, ge=0, le=MOST_STEPS)
    seed: int = Field(default=1, ge=-(2**63), lt=2**63)
    deviation: PositiveFloat = 0.02


class Cell(StrictModel):
    """One point of a sweep. Where ``search`` asks for batch or seq_len, that field is None.

    Attributes:
        model: a name, or the path of a Hugging Face config.json or of the folder that it lies in.
        model_config_json: what counts of that file, read when the cell is made; so a row stands for the file
            as it was, and other machines need no file.
        mesh: the axes of the mesh, from the slowest-varying rank to the fastest; None: as in MESH_AXES. Axes
            of one rank may be left out.
        device: where tensors are; the virtual engine's are fake ones on the CPU, whatever they stand for.
        rank: the rank that an engine plays which plays one alone; None: the one with the largest peak.
        meters: names of meters beside those of memory and communication.
        variant: names a variant of settings within a scenario, for comparison and plots.
        timeout_s: seconds after which a sweep gives the cell up; in no key or row, as it is not part of what
            is measured.
    """

    model: str
    model_config_json: dict[str, Any] | None = None
    strategy: str
    sizes: Sizes = Sizes()
    mesh: list[str] | None = None
    batch: Count | None = None
    seq_len: Count | None = None
    cluster: str = "local"
    engine: str = "virtual"
    device: Literal["cpu", "cuda"] = "cpu"
    rank: NonNegativeInt | None = None
    precision: Literal["fp16", "bf16", "fp32", "fp64"] = "fp32"
    model_options: dict[str, Any] = {}
    strategy_options: dict[str, Any] = {}
    training: TrainingOptions = TrainingOptions()
    timing: Timing = Timing()
    search: SearchRequest | None = None
    learning: Learning | None = None
    meters: list[str] = []
    variant: str = ""
    timeout_s: PositiveFloat | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read_model(cls, content: Any) -> Any:
        """Read the model's file, from the working directory, where that is not done."""
        if isinstance(content, Mapping) and content.get("model_config_json") is None:
            model = content.get("model")
            if isinstance(model, str) and names_a_file(model):
                return {**content, "model_config_json": read_model_file(model)}
        return content

    @field_validator("mesh")
    @classmethod
    def _check_mesh(cls, order: list[str] | None, info: ValidationInfo) -> list[str] | None:
        """The order; None for one that is the default, so that a cell has one key."""
        if order is None or "sizes" not in info.data:
            return None
        in_order(info.data["sizes"].by_axis, order)
        return None if order == sorted(order, key=MESH_AXES.index) else order

    @model_validator(mode="after")
    def _check_positions(self) -> Cell:
        if (self.batch or 1) * (self.seq_len or 1) > MOST_POSITIONS:
            raise ValueError(
                f"batch {self.batch} of {self.seq_len} positions are more than {MOST_POSITIONS} positions"
            )
        return self

    @property
    def model_arguments(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """The arguments of :func:`model_preset` for the cell's model."""
        return self.model, self.model_options, self.model_config_json

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Ranks along every axis of the mesh, from the slowest-varying to the fastest."""
        return in_order(self.sizes.by_axis, self.mesh or MESH_AXES)

    @property
    def mesh_text(self) -> str:
        """The axes of more than one rank in the order of the mesh, with their ranks, as "dp2xsp8"; or "1"."""
        return spelled(self.mesh_sizes)

    @property
    def key(self) -> str:
        """A stable name of the cell: readable, and a digest of all that defines it. A model's file counts by
        its path: what it holds is in the digest of what made a row (:mod:`spbench.bench.sweep.digest`)."""
        defining = self.model_dump(exclude_defaults=True, exclude={"model_config_json"})
        content = json.dumps(defining, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        batch = "max" if self.batch is None else self.batch
        length = "max" if self.seq_len is None else self.seq_len
        named = (self.model, self.strategy, self.mesh_text, f"b{batch}", f"L{length}", self.precision)
        variant = [self.variant] if self.variant else []
        return "/".join([*named, *variant, self.cluster, self.engine, digest])

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, seq_len) of a cell that searches for neither."""
        assert self.batch is not None, "batch is searched for"
        assert self.seq_len is not None, "seq_len is searched for"
        return self.batch, self.seq_len

    def at(self, value: int) -> Cell:
        """The same cell with the searched quantity set to a value, and no search."""
        assert self.search is not None
        return self.model_copy(update={self.search.quantity: value, "search": None})


@dataclass
class Measurement:
    """What an engine measured; None where it cannot know.

    Attributes:
        peak_memory_bytes: largest sum of live blocks of a caching allocator over the traced steps, as
            torch.cuda.max_memory_allocated.
        reserved_memory_bytes: what a caching allocator reserves for them.
        usable_memory_bytes: of the card; a step that needs more is out of memory. None: not limited.
        peak_phase: the phase of the step in which the peak falls.
        peak_rank: the rank that has it.
        peak_held: bytes by what held them at the peak; a block's slack is of what its tensor is of.
        by_class: the memory of each class of ranks that run the same program, at each traced step, where the
            meters count it (not on GPUs, whose own allocators do): ``rank`` (the first of them), ``ranks``
            (how many), ``stage`` (of the pipeline), ``step`` (from 1), ``status`` ("oom" from the step on
            that does not fit; its bytes are those on a card without a limit), ``peak_memory_bytes``,
            ``peak_phase``, ``peak_held`` (without zeros), ``reserved_memory_bytes`` (the largest so far),
            ``allocated_bytes`` (at the end of the step).
        communication: rows of :meth:`CommunicationMeter.rows`, of the ranks that send most in its pipeline
            stage.
        formula: the closed form of what these send, rows of :meth:`Plan.formula`.
        formula_difference: where meter and closed form disagree, rows of :meth:`Plan.difference`; empty is
            right.
        step_time_s: median of step_time_samples_s, or simulated.
        tokens_per_s, samples_per_s: the model's tokens of the whole batch, and its samples, over step_time_s.
        breakdown: what a simulated step time is made of; see :attr:`Timeline.by_rank`.
        calibration: of a simulated step time, "calibrated" or "uncalibrated".
        unpriced_operators: calls of operators whose cost is not known, by name; a simulated step time has
            them by the bytes that they move alone.
        losses: of a training run: ``step`` (from 1) and, by name, the global batch's losses before that
            step's update.
        meters: what further meters found on ``peak_rank``, by their names.
        ranks: of steps on real devices, what each rank's host and device say: ``rank``, ``host``,
            ``device``, :attr:`TimedSteps.device`.
        answer: the largest value that fits, for a search; proof: the probes that show it.
    """

    status: Status = "ok"
    reason: str = ""
    peak_memory_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    usable_memory_bytes: int | None = None
    peak_phase: str | None = None
    peak_rank: int = 0
    peak_held: dict[str, int] = field(default_factory=dict)
    by_class: list[dict[str, Any]] = field(default_factory=list)
    communication: list[dict[str, Any]] = field(default_factory=list)
    formula: list[dict[str, Any]] = field(default_factory=list)
    formula_difference: list[dict[str, Any]] = field(default_factory=list)
    step_time_s: float | None = None
    step_time_samples_s: list[float] = field(default_factory=list)
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    breakdown: dict[str, float] = field(default_factory=dict)
    calibration: str = ""
    unpriced_operators: dict[str, int] = field(default_factory=dict)
    losses: list[dict[str, float]] = field(default_factory=list)
    meters: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    answer: int | None = None
    proof: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a result row."""
        return asdict(self)
