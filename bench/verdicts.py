"""Verdicts of `spbench verify` in a file, so that pages can show which cases and which code are proven.

A folder has one file of JSON lines: for each run that left verdicts its head (backend, type of device,
commit, :func:`verified_code`, torch's version, time), then a line for each case, with the fields of
:class:`VerifyRow`; empty texts and unknown numbers are left out. A folder that is committed has a summary
instead, with such a line for each group of cases (scripts/prove.py).
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from spbench.bench.errors import UserError
from spbench.bench.files import write_whole
from spbench.bench.measured_code import digest_of_files, strategy_files
from spbench.bench.measurement import Count, Number, Signed, Text
from spbench.bench.row import problem
from spbench.impls import plugin_files

#: the files of verdicts in a folder of results: of all cases; of groups of cases, read where that is missing
VERDICTS_FILE, SUMMARY_FILE = "verdicts.jsonl", "summary.jsonl"

#: the fields of a :class:`VerifyRow`, and the fields of its run's head
Verdict = dict[str, Any]

#: the fields of a run's head, which all of its verdicts share
RUN = ("backend", "device", "commit", "code", "torch", "time")
#: the fields that identify a case, whose later verdict replaces an earlier one
CASE = (
    *("strategy", "model", "variant", "part", "size", "mesh", "dtype", "batch", "seq_len"),
    *("backend", "device"),
)


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """The verdict on one case.

    Attributes:
        variant: options of model (if not the preset's), strategy and backend, as "name=value".
        size: the number of ranks.
        mesh: the number of ranks along each axis, as "tp2xsp3".
        dtype: a key of :data:`PRECISIONS`.
        batch, seq_len: whole sizes, in samples and positions; 0 if an earlier release left them out.
        cases: the number of cases that a line of a summary is for; ``size`` is their largest, and the other
            fields are the worst case's.
        status: "unsupported" (the strategy cannot run these sizes) and "as published" (a published baseline
            computes what its authors' code does, which is not what the model asks for) are no faults.
        error, limit: the relative error of the worst tensor over all ranks, and its limit; the worst tensor
            has the largest error for its limit.
        tensor, rank: the worst tensor, and the rank on which it is.
        factor: the number by which a RED tensor differs from its reference, if there is one.
        verdict: whether forward or backward is wrong, how the tensor is wrong, and which other tensors are;
            of a baseline as published, how it departs from the model.
        reason: a line on why the case is unsupported, or what a rank raised.
        bytes: how the bytes that ranks send differ from the closed forms of strategy and backend; "equal"; or
            "" where there is no closed form, as for a part of a model.
        explanation: for a RED row, if it was asked for, lines on where its step goes wrong first.
        traceback: the traceback of what a rank raised.
    """

    #: the value of ``bytes`` where all bytes are those of the closed forms
    EQUAL = "equal"

    strategy: Text
    model: Text
    variant: Text = ""
    part: Text
    size: Count
    mesh: Text = ""
    dtype: Text
    batch: Count = 0
    seq_len: Count = 0
    cases: Count = 1
    status: Literal["green", "RED", "unsupported", "as published"]
    error: Number | None = None
    limit: Number | None = None
    tensor: Text = ""
    rank: Count | None = None
    factor: Signed | None = None
    verdict: Text = ""
    reason: Text = ""
    bytes: Text = ""
    explanation: Text = ""
    traceback: Text = ""


class _Head(TypedDict):
    backend: Text
    device: NotRequired[Text]
    commit: NotRequired[Text | None]
    code: NotRequired[Text | None]
    torch: NotRequired[Text | None]
    time: NotRequired[Text | None]


_HEAD, _CASE = TypeAdapter(_Head), TypeAdapter(VerifyRow)
#: the default of each field, which verdicts of earlier releases may lack
_FIELDS: Verdict = {each.name: each.default for each in fields(VerifyRow) if each.default is not MISSING}
_FIELDS |= dict.fromkeys(RUN, "")


@cache
def verified_code() -> str:
    """The digest of the Python files that verdicts depend on, at the first call: impls/ and installed
    plug-ins."""
    root = Path(__file__).resolve().parents[1]
    return digest_of_files(root, [*strategy_files(root), *plugin_files()])


def read_verdicts(folder: Path) -> list[Verdict]:
    """The verdicts in a folder, in the order of their cases, or those of its summary; none if the folder has
    neither file.

    Raises:
        UserError: the file cannot be read, or a line is not a verdict.
    """
    path = next((each for name in (VERDICTS_FILE, SUMMARY_FILE) if (each := folder / name).exists()), None)
    return [] if path is None else verdicts_in(path)


def verdicts_in(path: Path) -> list[Verdict]:
    """The verdicts in a file, as :func:`read_verdicts` returns them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    verdicts: list[Verdict] = []
    head: Verdict = {}
    for number, line in enumerate(lines, start=1):
        content = _read(path, number, line)
        if "status" in content:
            verdicts.append({**_FIELDS, **head, **content})
        else:
            head = content
    return verdicts


def _read(path: Path, number: int, line: str) -> Verdict:
    """The content of a line of the file: the head of a run, or a case."""
    try:
        content: Verdict = json.loads(line)
        (_CASE if isinstance(content, dict) and "status" in content else _HEAD).validate_python(content)
    except (ValueError, RecursionError) as error:
        what = problem(error) if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path}:{number}: not a verdict ({what}); delete the file, and verify again"
        ) from error
    return content


@contextmanager
def kept_verdicts(folder: Path | None, run: Mapping[str, Any]) -> Iterator[list[Verdict]]:
    """A context with an empty list for the verdicts of a run. At its end, even after an error, the list is
    written to the folder's file together with earlier verdicts; to no file if ``folder`` is None.

    Args:
        run: fields that are added to each verdict.

    Raises:
        UserError: the file cannot be read or written; an earlier file stays as it was.
    """
    verdicts: list[Verdict] = []
    path = folder and folder / VERDICTS_FILE
    earlier = verdicts_in(path) if path and path.exists() else []
    try:
        yield verdicts
    finally:
        if path:
            newest = {values_of(row, CASE): row for row in (*earlier, *({**row, **run} for row in verdicts))}
            write_whole(path, as_lines(newest))


def values_of(row: Verdict, names: Iterable[str]) -> tuple[str, ...]:
    """The values of a verdict's fields as texts; "" is an unknown number."""
    return tuple(str(row[name] if row[name] is not None else "") for name in names)


def as_lines(verdicts: Mapping[tuple[str, ...], Verdict]) -> str:
    """Verdicts by key as JSON lines: runs in order, a run's keys in order, so that a diff shows changes."""
    runs: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
    for case in sorted(verdicts):
        runs[values_of(verdicts[case], RUN)].append(verdicts[case])
    lines: list[Verdict] = []
    for run in sorted(runs):
        lines.append(dict(zip(RUN, run, strict=True)))
        for row in runs[run]:  # without the fields that the head of the run has
            left_out = (*RUN, "cases") if row["cases"] == 1 else RUN
            lines.append({n: v for n, v in row.items() if n not in left_out and v not in ("", None)})
    return "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
