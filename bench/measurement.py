"""A measurement, what an engine makes of a cell, and an outcome, what becomes of a cell that is run."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    StringConstraints,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from typing_extensions import TypedDict

#: what is measured or counted: far larger numbers are damage, and overflow where they are added
Number = Annotated[float, Field(strict=True, ge=0, le=1e24, allow_inf_nan=False)]
#: a difference, a loss: any number
Signed = Annotated[float, Field(strict=True, ge=-1e300, le=1e300, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=10**24)]
Text = Annotated[str, StringConstraints(strict=True)]

#: ok, oom and unsupported are results; numerics: a value is not finite or too far off; mismatch: a rank sends
#: other bytes than its strategy's closed form says; failed and timeout: there is no result
Status = Literal["ok", "oom", "unsupported", "failed", "timeout", "numerics", "mismatch"]

#: characters of a reason; the whole text is in the traceback
REASON_LENGTH = 300


class Record(BaseModel, Mapping[str, Any]):
    """A part of a results file: a model whose attributes have defaults, and a read-only mapping of what is
    set, which is what is written. Further keys are kept.

    What is read from a file (:meth:`read`) is checked and then kept as it was written, to the type of each
    number. What the program makes itself is taken as it is: it may hold NaN, which a status explains.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def read(cls, content: Any) -> Self:
        """The record in the content of a file; ValidationError if the content is no record."""
        return cls.model_validate(content, context=_FROM_FILE)

    @field_validator("*", mode="wrap")
    @classmethod
    def _keep(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if info.context is not _FROM_FILE and info.field_name not in cls._nested():
            return value
        checked = check(value)
        return checked if info.field_name in cls._nested() else value

    @classmethod
    def _nested(cls) -> tuple[str, ...]:
        """The names of fields that hold records, or lists of records."""
        return ()

    def __getitem__(self, name: str) -> Any:
        if name in self.model_fields_set:
            return self.__dict__[name] if name in self.__dict__ else (self.__pydantic_extra__ or {})[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return (name for name, _ in self.items())

    def items(self) -> ItemsView[str, Any]:
        """The fields that are set, with their values, and the further keys."""
        fields_set = self.model_fields_set
        own = {name: value for name, value in self.__dict__.items() if name in fields_set}
        return (own | (self.__pydantic_extra__ or {})).items()

    def __len__(self) -> int:
        return len(self.model_fields_set)

    def __contains__(self, name: object) -> bool:
        return name in self.model_fields_set

    def __or__(self, changes: Mapping[str, Any]) -> Self:
        """A record with other values of some fields."""
        return type(self)(**{**self, **changes})

    __eq__ = Mapping.__eq__


#: the context of a validation whose content comes from a file
_FROM_FILE = "file"


def described_by(schema: Any) -> GetPydanticSchema:
    """Checks a field of a file by ``schema``, which differs from the type that readers see."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(schema))


class _Sent(TypedDict):
    sent_bytes: Number


class _PricedBy(TypedDict):
    work: Text
    by: Text
    grade: Text
    share: Number


class _ClassMemory(TypedDict, total=False):
    peak_memory_bytes: Number | None
    reserved_memory_bytes: Number | None
    allocated_bytes: Number | None
    host_memory_bytes: Number | None
    returned_bytes: Number
    peak_held: dict[Text, Number]
    phase_ends: dict[Text, dict[Text, Number]]


class _Rank(TypedDict, total=False):
    rank: Count
    device: Text


Bytes = Annotated[int, described_by(Number)]
Sent = Annotated[dict[str, Any], described_by(_Sent)]
PricedBy = Annotated[dict[str, Any], described_by(_PricedBy)]
ClassMemory = Annotated[dict[str, Any], described_by(_ClassMemory)]
RankFacts = Annotated[dict[str, Any], described_by(_Rank)]
#: by name; a file has null for what is not finite
Amounts = Annotated[dict[str, float], described_by(dict[Text, Signed | None])]


class Measurement(Record):
    """What an engine measured; None where it cannot know.

    Attributes:
        peak_memory_bytes: largest sum of live blocks of a caching allocator over the traced steps, as
            torch.cuda.max_memory_allocated.
        setup_peak_memory_bytes: the same before the first step, on ``peak_rank``, where the meters count it.
        reserved_memory_bytes: what a caching allocator reserves for set-up and steps.
        usable_memory_bytes: of the card; a step that needs more is out of memory. None: not limited.
        peak_phase: the phase of the step in which the peak falls.
        peak_rank: the rank that has it.
        peak_held: bytes by what held them at the peak; a block's slack is of what its tensor is of.
        peak_host_memory_bytes: the most that a rank holds in its host's memory, what is pinned as PyTorch's
            allocator counts it; node_host_memory_bytes: that the ranks of a node hold together. None: they
            hold none.
        by_class: the memory of each class of ranks that run the same program, in set-up and at each traced
            step, where the meters count it (not on GPUs, whose own allocators do): ``rank`` (the first of
            them), ``ranks`` (how many), ``stage`` (of the pipeline), ``step`` (from 1; 0 is set-up, whose
            ``peak_phase`` is "set-up"), ``status`` ("oom" from the step on that does not fit, or in set-up
            alone; its bytes are those on a card without a limit), ``peak_memory_bytes``, ``peak_phase``,
            ``peak_held`` (without zeros), ``reserved_memory_bytes`` (the largest so far), ``allocated_bytes``
            (at the end of the step), ``phase_ends`` (of each phase of the step by name, where the last one of
            that name ends, the bytes ``allocated`` then, and ``reserved`` up to then); where a rank holds
            any, ``host_memory_bytes`` (the most so far); where the card is full, ``returned_bytes`` (that the
            allocator returns to it within the step, to ask for others; no step time counts that).
        imbalance: where sequences are packed of documents or ranks have unlike work, the pairs of a query and
            a key of the rank that attends to most, over the mean of all ranks.
        expert_imbalance: of models with experts, the tokens of the rank whose experts get most, over the mean
            of all ranks.
        dropped_tokens: of these, how often in a block and a step of all replicas an expert with full capacity
            does not take a token.
        routing: of these, how tokens go to experts; see :class:`RoutingPlan`.
        communication: rows of :meth:`CommunicationMeter.rows`, of the ranks that send most in its pipeline
            stage.
        formula: the closed form of what these send, rows of :meth:`Plan.formula`.
        formula_difference: where meter and closed form disagree, rows of :meth:`Plan.difference`; empty is
            right.
        step_time_s: median of step_time_samples_s, or simulated.
        tokens_per_s, samples_per_s: the model's tokens of the whole batch, and its samples, over step_time_s.
        breakdown: what a simulated step time is made of; see :attr:`Timeline.by_rank`.
        parts: what computing and exposed communication of a simulated step are; see :attr:`Timeline.parts`.
        bound: which of these, or of the breakdown's other parts, takes most of the step, one of
            :data:`BOUNDS`.
        mfu: model FLOPs utilization, from 0 to 1; see :func:`utilization`.
        flops: of a simulated step, of all ranks together: ``model``, those of the model on a single device,
            which ``mfu`` counts; ``forward``, those metered in forward phases, ``model`` having three times
            these in training where no rank repeats or pads work of another; ``all``, those metered in all
            phases, with what backward computes again.
        calibration: of a simulated step time, "calibrated" or "uncalibrated".
        rates: of a simulated step time, what its rates are; see :func:`add_step_time`, :func:`rates_of_step`.
        priced_by: of a simulated step time, what has no rate of its own: ``work``, what it is priced ``by``,
            the ``grade`` of that (:mod:`measure.simulator.substitutes`), and the ``share`` of the step
            that such work takes by that price, hidden or not; the largest first.
        unpriced_operators: calls of operators whose cost is not known, by name; a simulated step time has
            them by the bytes that they move alone.
        losses: of a training run: ``step`` (from 1) and, by name, the global batch's losses before that
            step's update.
        errors: of whole tensors, relative to float64, by name, from the engine lockstep: of outputs and of
            gradients ("d_q"), or of the loss, of all gradients as one vector, and of the worst of them.
        meters: what further meters found on ``peak_rank``, by their names.
        ranks: of steps on real devices, what each rank's host and device say: ``rank``, ``host``,
            ``device``, and on a GPU the bytes of torch's caching allocator: allocated before the timed steps,
            at the peak allocated and reserved, and what of torch.cuda.memory_stats says that memory was
            short; under ``telemetry``, :meth:`Telemetry.summary`.
        answer: the largest value that fits, for a search; proof: the probes that show it.
    """

    status: Status = "ok"
    reason: str = ""
    peak_memory_bytes: Bytes | None = None
    setup_peak_memory_bytes: Bytes | None = None
    reserved_memory_bytes: Bytes | None = None
    usable_memory_bytes: Bytes | None = None
    peak_phase: Text | None = None
    peak_rank: Count = 0
    peak_held: dict[Text, Bytes] = {}
    peak_host_memory_bytes: Bytes | None = None
    node_host_memory_bytes: Bytes | None = None
    by_class: list[ClassMemory] = []
    imbalance: Number | None = None
    expert_imbalance: Number | None = None
    dropped_tokens: Count | None = None
    routing: Text = ""
    communication: list[Sent] = []
    formula: list[Sent] = []
    formula_difference: list[dict[str, Any]] = []
    step_time_s: Number | None = None
    step_time_samples_s: list[Number] = []
    tokens_per_s: Number | None = None
    samples_per_s: Number | None = None
    breakdown: Amounts = {}
    parts: Amounts = {}
    bound: Text = ""
    mfu: Number | None = None
    flops: dict[Text, Number] = {}
    calibration: Text = ""
    rates: Text = ""
    priced_by: list[PricedBy] = []
    unpriced_operators: dict[str, int] = {}
    losses: list[Amounts] = []
    errors: dict[Text, Number] = {}
    meters: dict[Text, dict[str, Any]] = {}
    ranks: list[RankFacts] = []
    answer: Count | None = None
    proof: list[dict[str, Any]] = []

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, also those that are as by default: plain data for a row."""
        return {name: getattr(self, name) for name in Measurement.model_fields}


class Measured(Measurement):
    """A measurement in a results file: of a cell, of one of its rounds, or of a benchmark of pytest.

    Attributes:
        time: when a round was measured.
        time_s, time_samples_s: of a benchmark, the median of its samples, and the samples.
    """

    time: Text = ""
    time_s: Number | None = None
    time_samples_s: list[Number] = []


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        traceback: of what was raised; "" unless it failed.
        log: what the worker and its ranks printed last, and the stacks of those that hung; "" unless it
            failed, ran out of time, or ran out of memory on real ranks.
        final: whether another run, also on another machine, would have the same outcome.
        provenance: of the process that ran it; None: that of this process.
    """

    status: Status
    reason: str = ""
    measurement: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    log: str = ""
    elapsed_s: float | None = None
    final: bool = True
    provenance: dict[str, str | None] | None = None


def shortened(text: str) -> str:
    """Beginning and end of a text, as a reason. Errors of launchers are whole reports with the cause last."""
    if len(text) <= REASON_LENGTH:
        return text
    return f"{text[: REASON_LENGTH // 3]} ... {text[-REASON_LENGTH // 2 :]}"


def filled(measured: Mapping[str, Any]) -> float | None:
    """The part of the memory that tensors can have which the fullest rank reserves, where it runs out of
    memory on a card without a limit; at least 1 where memory has to be given back. None: nothing is known."""
    usable = measured.get("usable_memory_bytes")
    reserved = [entry.get("reserved_memory_bytes") for entry in measured.get("by_class") or ()]
    most = max([n for n in [*reserved, measured.get("reserved_memory_bytes")] if n], default=None)
    if not usable or most is None:
        return None
    return max(most / usable, 1.0 if returned_bytes(measured) else 0.0)


def returned_bytes(measured: Mapping[str, Any]) -> int:
    """The most bytes that the allocator of a rank gives back to its card in a step that fits, as it has no
    room otherwise."""
    steps = (entry for entry in measured.get("by_class") or () if entry.get("step"))
    return max((entry.get("returned_bytes", 0) for entry in steps), default=0)
