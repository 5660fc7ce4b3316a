"""A measurement, the numbers that an engine returns for a cell, and an outcome, the result of running it."""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
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

#: a measured or counted number; far larger numbers are damage, and would overflow in sums
Number = Annotated[float, Field(strict=True, ge=0, le=1e24, allow_inf_nan=False)]
#: a difference or a loss, of either sign
Signed = Annotated[float, Field(strict=True, ge=-1e300, le=1e300, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=10**24)]
Text = Annotated[str, StringConstraints(strict=True)]

#: ok, oom and unsupported are results; numerics: a value is not finite or too far off; mismatch: a rank sends
#: other bytes than by its strategy's closed form; failed and timeout: there is no result
Status = Literal["ok", "oom", "unsupported", "failed", "timeout", "numerics", "mismatch"]

#: the most characters of a reason; the whole text is in the traceback
REASON_LENGTH = 300


class Record(BaseModel, Mapping[str, Any]):
    """A part of a results file: a model whose attributes have defaults, and a read-only mapping of the fields
    that are set, which are written to the file. Further keys are kept.

    Content of a file (:meth:`read`) is checked and then kept as it was written, to the type of each number.
    Values that the program makes are not checked: they may contain NaN, which a status explains.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def read(cls, content: Any) -> Self:
        """The record in the parsed content of a file; ValidationError if the content is no record."""
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
        """The names of fields that are records, or lists of records."""
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
        """A copy of the record with the values of some fields replaced by ``changes``."""
        return type(self)(**{**self, **changes})

    __eq__ = Mapping.__eq__


#: pydantic's validation context for content that comes from a file
_FROM_FILE = "file"


def described_by(schema: Any) -> GetPydanticSchema:
    """An annotation by which a file's field is checked by ``schema`` instead of the annotated type."""
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
    returned_s: Number
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
#: numbers by name; a file has null for a number that is not finite
Amounts = Annotated[dict[str, float], described_by(dict[Text, Signed | None])]


class Measurement(Record):
    """The numbers that an engine measured; a number is None where the engine cannot know it.

    Attributes:
        peak_memory_bytes: the largest sum of a caching allocator's live blocks over the traced steps, as
            torch.cuda.max_memory_allocated.
        setup_peak_memory_bytes: the same sum before the first step, on ``peak_rank``, if meters count it.
        reserved_memory_bytes: the bytes that a caching allocator reserves for set-up and steps.
        usable_memory_bytes: the card's usable memory; a larger step is out of memory. None: not limited.
        peak_phase: the phase of the step in which the peak falls.
        peak_rank: the rank with the largest peak.
        peak_held: the bytes at the peak by category of tensors; a block's slack counts with its tensor.
        peak_host_memory_bytes: the most bytes that a rank holds in its host's memory, pinned memory as
            PyTorch's allocator counts it; node_host_memory_bytes: the bytes that the ranks of a node hold
            together. None: the ranks hold none.
        by_class: the memory of each class of ranks that run the same program, in set-up and at each traced
            step, where the meters count it (not on GPUs, whose own allocators do): ``rank`` (the first of the
            class), ``ranks`` (how many), ``stage`` (of the pipeline), ``step`` (from 1; 0 is set-up, whose
            ``peak_phase`` is "set-up"), ``status`` ("oom" from the first step on that does not fit, or only
            in set-up; its bytes are those on a card without a limit), ``peak_memory_bytes``, ``peak_phase``,
            ``peak_held`` (without zeros), ``reserved_memory_bytes`` (the largest so far), ``allocated_bytes``
            (at the end of the step), ``phase_ends`` (by name of a phase, at the end of the last phase of that
            name, the bytes ``allocated`` then, and ``reserved`` up to then); if the rank holds any,
            ``host_memory_bytes`` (the most so far); if the card is full, ``returned_bytes`` (the bytes that
            the allocator returns to the card within the step, to get other blocks) and ``returned_s`` (the
            seconds of the driver's calls for them, by benchmarks of these calls on other cards).
        imbalance: for packed documents or ranks with unequal work, the number of query-key pairs of the rank
            with the most pairs, over the mean of all ranks.
        padding: the share of the tokens that pad packed documents; None: there are none.
        expert_imbalance: for models with experts, the tokens of the rank whose experts get most, over the
            mean of all ranks.
        dropped_tokens: for models with experts, how often, in a block and a step of all replicas, an expert
            with full capacity refuses a token.
        routing: for models with experts, how tokens go to experts; see :class:`RoutingPlan`.
        communication: rows of :meth:`CommunicationMeter.rows`, of the rank that sends most in each pipeline
            stage.
        formula: the bytes that these ranks send by the closed form, rows of :meth:`Plan.formula`.
        formula_difference: the disagreements of meter and closed form, rows of :meth:`Plan.difference`.
        step_time_s: the median of step_time_samples_s, or the simulated time.
        tokens_per_s, samples_per_s: the tokens and the samples of the whole batch, over step_time_s.
        breakdown: the parts of a simulated step time; see :attr:`Timeline.by_rank`.
        parts: the parts of computing and exposed communication in it; see :attr:`Timeline.parts`.
        bound: the part, of ``parts`` or ``breakdown``, that takes most of the step, one of :data:`BOUNDS`.
        mfu: model FLOPs utilization, from 0 to 1; see :func:`utilization`.
        flops: FLOPs of a simulated step, of all ranks together: ``model``, of the model on a single device,
            which ``mfu`` counts; ``forward``, metered in forward phases (``model`` is three times as many in
            training where no rank repeats or pads another's work); ``all``, metered in all phases, with
            recomputation.
        calibration: whether a simulated step time is "calibrated" or "uncalibrated".
        rates: the class of a simulated time's rates; see :func:`add_step_time`, :func:`rates_of_step`.
        priced_by: for a simulated step time, the kinds of work without a rate of their own: ``work``, the
            work whose rate prices it (``by``), the ``grade`` of this substitute
            (:mod:`measure.simulator.substitutes`), and the ``share`` of the step that such work takes by
            that price, hidden or not; the largest share first.
        unpriced_operators: the number of calls of operators whose cost is not known, by name; a simulated
            step time counts only the bytes that they move.
        losses: for a training run, ``step`` (from 1) and, by name, the global batch's losses before that
            step's update.
        errors: errors of whole tensors relative to float64, by name, from the engine lockstep: of outputs and
            gradients ("d_q"), or of the loss, of all gradients as one vector, and of the worst gradient.
        meters: the results of further meters on ``peak_rank``, by meter.
        ranks: for steps on real devices, for each rank ``rank``, ``host``, ``device``, and on a GPU the bytes
            of torch's caching allocator: allocated before the timed steps, allocated and reserved at the
            peak, and counters of torch.cuda.memory_stats that show a lack of memory; under ``telemetry``,
            :meth:`Telemetry.summary`.
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
    padding: Number | None = None
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
        """All fields by name, including fields with default values: plain data for a row."""
        return {name: getattr(self, name) for name in Measurement.model_fields}


class Measured(Measurement):
    """A measurement in a results file: of a cell, of one of its rounds, or of a benchmark of pytest.

    Attributes:
        time: when a round was measured.
        time_s, time_samples_s: for a benchmark, the median of its samples, and the samples, in seconds.
    """

    time: Text = ""
    time_s: Number | None = None
    time_samples_s: list[Number] = []


@dataclass(frozen=True)
class Outcome:
    """The outcome of running a cell.

    Attributes:
        traceback: the traceback of the error that was raised; "" unless the cell failed.
        log: the last lines that the worker and its ranks printed, and the stacks of ranks that hung; ""
            unless the cell failed, ran out of time, or ran out of memory on real ranks.
        final: whether another run, also on another machine, would have the same outcome.
        provenance: the provenance of the process that ran the cell; None: that of this process.
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
    """A text as a reason: if too long, only its beginning and its end, because launchers name causes last."""
    if len(text) <= REASON_LENGTH:
        return text
    return f"{text[: REASON_LENGTH // 3]} ... {text[-REASON_LENGTH // 2 :]}"


def filled(measured: Mapping[str, Any]) -> float | None:
    """The bytes that the fullest rank reserves (if out of memory, on a card without a limit), as a share of
    the card's usable memory; at least 1 if memory has to be returned to the card; None if not known."""
    usable = measured.get("usable_memory_bytes")
    reserved = [entry.get("reserved_memory_bytes") for entry in measured.get("by_class") or ()]
    most = max([n for n in [*reserved, measured.get("reserved_memory_bytes")] if n], default=None)
    if not usable or most is None:
        return None
    return max(most / usable, 1.0 if returned(measured.get("by_class") or ()) else 0.0)


def returned(by_class: Sequence[Mapping[str, Any]], field: str = "returned_bytes", first: int = 1) -> Any:
    """The most ``returned_bytes`` (or ``returned_s``) of a rank in a step from number ``first`` on."""
    return max((each.get(field, 0) for each in by_class if (each.get("step") or 0) >= first), default=0)


#: for each bound of a step, the fields of :attr:`Measurement.parts` and :attr:`Measurement.breakdown` it sums
BOUNDS = {
    "matmul": ("matmul_s",),
    "attention": ("attention_s",),
    "memory": ("memory_bound_s",),
    "intra-node links": ("intra_node_s",),
    "inter-node links": ("inter_node_s",),
    "bubble": ("bubble_s",),
    "host": ("overhead_s", "host_s", "allocator_s"),
}


def bound_of(seconds: Mapping[str, float]) -> str:
    """The key of :data:`BOUNDS` that takes most of a step, the first if several do; "" if all take 0 s.

    Args:
        seconds: seconds by part of the step; an absent part takes 0 s.
    """
    taken = {name: sum(seconds.get(part, 0.0) for part in of) for name, of in BOUNDS.items()}
    most = max(taken, key=taken.__getitem__)
    return most if taken[most] > 0 else ""
