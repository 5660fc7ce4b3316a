"""What a result row must be: numbers that are finite and not negative, texts where texts belong.

Only what the harness reads is described; rows may have more. A row is checked and otherwise left as it was
written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NotRequired

from pydantic import Field, PositiveInt, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from spbench.bench.json_values import Count, Number, Signed, Text, problem
from spbench.bench.measurement import Status
from spbench.bench.yaml_files import dotted


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
    peak_held: dict[Text, Number]
    phase_ends: dict[Text, dict[Text, Number]]


class _Rank(TypedDict, total=False):
    rank: Count
    device: Text


class _Timed(TypedDict, total=False):
    """What may differ from process to process."""

    peak_memory_bytes: Number | None
    reserved_memory_bytes: Number | None
    step_time_s: Number | None
    step_time_samples_s: list[Number]
    tokens_per_s: Number | None
    time_s: Number | None
    time_samples_s: list[Number]


class _Measured(_Timed, total=False):
    setup_peak_memory_bytes: Number | None
    usable_memory_bytes: Number | None
    peak_phase: Text | None
    peak_rank: Count
    peak_held: dict[Text, Number]
    peak_host_memory_bytes: Number | None
    node_host_memory_bytes: Number | None
    by_class: list[_ClassMemory]
    imbalance: Number | None
    communication: list[_Sent]
    formula: list[_Sent]
    formula_difference: list[dict[str, Any]]
    samples_per_s: Number | None
    breakdown: dict[Text, Signed | None]
    parts: dict[Text, Signed | None]
    bound: Text
    mfu: Number | None
    flops: dict[Text, Number]
    calibration: Text
    rates: Text
    priced_by: list[_PricedBy]
    losses: list[dict[Text, Signed | None]]
    errors: dict[Text, Number]
    meters: dict[Text, dict[str, Any]]
    ranks: list[_Rank]
    answer: Count | None
    proof: list[dict[str, Any]]


class _Round(_Timed, total=False):
    time: Text


class _Search(TypedDict, total=False):
    quantity: Text


class _Cell(TypedDict, total=False):
    model: Text
    strategy: Text
    sizes: dict[Text, Annotated[PositiveInt, Field(strict=True, le=10**9)]]
    mesh: list[Text] | None
    batch: Count | None
    seq_len: Count | None
    cluster: Text
    engine: Text
    precision: Text | None
    variant: Text
    search: _Search | None
    training: dict[str, Any] | None


class _Machine(TypedDict, total=False):
    os: Text | None
    cpu: Text | None
    cores: Count | None
    memory_bytes: Count | None
    gpus: list[Text] | None
    gpu_driver: Text | None


class _Provenance(TypedDict, total=False):
    spbench: Text | None
    tree: Text | None
    commit: Text | None
    project_commit: Text | None
    torch: Text | None
    python: Text | None
    host: Text | None
    cpu: Text | None
    machine: _Machine | None


class _Row(TypedDict):
    key: Annotated[str, StringConstraints(strict=True, min_length=1)]
    cell: _Cell
    status: Status
    measurement: _Measured
    reason: NotRequired[Text]
    rounds: NotRequired[list[_Round]]
    elapsed_s: NotRequired[Number | None]
    time: NotRequired[Text]
    provenance: NotRequired[_Provenance | None]


_ROW = TypeAdapter(_Row)


class WrongRow(ValueError):
    """A line is not a row: the field, and what is wrong with it."""


def parse_row(line: bytes) -> dict[str, Any]:
    """The row in a line of JSON.

    Raises:
        WrongRow: it is none, or a number in it is not finite.
    """
    row, not_finite = parse_any_row(line)
    if not_finite:
        raise WrongRow(f"{not_finite[0]}: not a finite number")
    return row


def parse_any_row(line: bytes) -> tuple[dict[str, Any], list[str]]:
    """The row in a line of JSON, with NaN for every number that is not finite, and the names of these fields.

    Raises:
        WrongRow: it is none.
    """
    constants: list[str] = []
    try:
        row = _decoder(constants).decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise WrongRow(str(error)) from error
    try:
        _ROW.validate_python(row)
        if not constants:
            return row, []
    except ValidationError as error:
        what = problem(error)
        if not isinstance(row, dict):
            raise WrongRow(what) from error
    else:
        what = ""
    not_finite = [dotted(path) for path in _not_finite(row)]
    try:  # with zeros in their places: is anything else wrong?
        _ROW.validate_python(finite(row, 0))
    except ValidationError as error:
        raise WrongRow(what) from error
    return finite(row, math.nan), not_finite


def _decoder(constants: list[str]) -> json.JSONDecoder:
    """A decoder that keeps what of the constants NaN, Infinity and -Infinity it meets."""

    def constant(text: str) -> float:
        constants.append(text)
        return math.nan

    return json.JSONDecoder(parse_constant=constant)


def _not_finite(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _not_finite(each, (*path, key))


def finite(value: Any, by: float | None = None) -> Any:
    """The value with another in place of each number that JSON cannot say: infinities and not-a-number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else by
    if isinstance(value, Mapping):
        return {key: finite(inner, by) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner, by) for inner in value]
    return value
