"""Verdicts of `spbench verify` in a file, so that pages can show what is proven, and of which code.

A folder has one file of JSON lines: for each run that left verdicts its head (backend, type of device,
commit, :func:`verified_code`, torch's version, time), then a line for each case, with the fields of
:class:`VerifyRow`; a text that is empty and a number that is not known are left out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from spbench.bench.errors import UserError
from spbench.bench.files import write_whole
from spbench.bench.measured_code import digest_of_files
from spbench.bench.measurement import Count, Number, Signed, Text
from spbench.bench.row import problem
from spbench.impls.discovery import plugin_files

VERDICTS_FILE = "verdicts.jsonl"

Verdict = dict[str, Any]

#: what the head of a run says of all its verdicts
RUN = ("backend", "device", "commit", "code", "torch", "time")
#: what names a case; a later verdict on it takes the place of an earlier one
CASE = (
    *("strategy", "model", "variant", "part", "size", "mesh", "dtype", "batch", "seq_len"),
    *("backend", "device"),
)
#: of later releases: an earlier file has none of these
FURTHER = ("bytes", "explanation", "traceback")
#: what a reader finds in every verdict
_FIELDS: Verdict = {
    **dict.fromkeys((*CASE, *RUN, "status", "tensor", "verdict", "reason", *FURTHER), ""),
    **dict.fromkeys(("error", "limit", "rank", "factor")),
}


class _Head(TypedDict):
    backend: Text
    device: NotRequired[Text]
    commit: NotRequired[Text | None]
    code: NotRequired[Text | None]
    torch: NotRequired[Text | None]
    time: NotRequired[Text | None]


class _Case(TypedDict):
    strategy: Text
    model: Text
    part: Text
    size: Count
    dtype: Text
    status: Text
    variant: NotRequired[Text]
    mesh: NotRequired[Text]
    batch: NotRequired[Count]
    seq_len: NotRequired[Count]
    error: NotRequired[Number | None]
    limit: NotRequired[Number | None]
    rank: NotRequired[Count | None]
    factor: NotRequired[Signed | None]
    tensor: NotRequired[Text]
    verdict: NotRequired[Text]
    reason: NotRequired[Text]
    bytes: NotRequired[Text]
    explanation: NotRequired[Text]
    traceback: NotRequired[Text]


_HEAD, _CASE = TypeAdapter(_Head), TypeAdapter(_Case)


@cache
def verified_code() -> str:
    """A digest of the Python files that a verdict is on, as they are at the first call: impls/ and installed
    plug-ins."""
    root = Path(__file__).resolve().parents[3]
    return digest_of_files(root, [*(root / "impls").rglob("*.py"), *plugin_files()])


def read_verdicts(folder: Path) -> list[Verdict]:
    """The verdicts in a folder, in the order of their cases; none if it has no file of them.

    Raises:
        UserError: the file cannot be read, or a line is not a verdict.
    """
    path = folder / VERDICTS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    found: list[Verdict] = []
    head: Verdict = {}
    for number, line in enumerate(lines, start=1):
        content = _read(path, number, line)
        if "status" in content:
            found.append({**_FIELDS, **head, **content})
        else:
            head = content
    return found


def _read(path: Path, number: int, line: str) -> Verdict:
    """A head, or a case."""
    try:
        found: Verdict = json.loads(line)
        (_CASE if isinstance(found, dict) and "status" in found else _HEAD).validate_python(found)
    except (ValueError, RecursionError) as error:
        what = problem(error) if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path}:{number}: not a verdict ({what}); delete the file, and verify again"
        ) from error
    return found


@contextmanager
def kept_verdicts(folder: Path | None, made: Mapping[str, Any]) -> Iterator[list[Verdict]]:
    """A list for the verdicts of a run, which are written to a folder beside earlier ones when it ends, also
    by an error; None: nothing is written.

    Args:
        made: further fields of each of them.

    Raises:
        UserError: the file cannot be read or written; an earlier one is as it was.
    """
    found: list[Verdict] = []
    earlier = [] if folder is None else read_verdicts(folder)
    try:
        yield found
    finally:
        if folder is not None:
            write_whole(folder / VERDICTS_FILE, _text([*earlier, *({**row, **made} for row in found)]))


def _text(verdicts: Iterable[Verdict]) -> str:
    """Runs in the order of their heads, each with its cases in theirs: a diff shows what has changed."""
    by_case = {tuple(row[name] for name in CASE): row for row in verdicts}
    runs: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
    for case in sorted(by_case):
        runs[tuple(str(by_case[case][name] or "") for name in RUN)].append(by_case[case])
    lines: list[Verdict] = []
    for run in sorted(runs):
        lines.append(dict(zip(RUN, run, strict=True)))
        lines += [_case(row) for row in runs[run]]
    return "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)


def _case(row: Verdict) -> Verdict:
    """What is known of a case and is not said of its run."""
    return {name: value for name, value in row.items() if name not in RUN and value not in ("", None)}
