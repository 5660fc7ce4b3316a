"""What pytest-benchmark writes (``--benchmark-json``, ``--benchmark-autosave``), as result rows.

Each benchmark is a row: its full name is the key, its time the metric ``time_s``, measured, with the samples
of all its rounds, where the file has them. Where it comes from is read from ``machine_info`` and
``commit_info``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.regressions.rounds import merged_rounds
from spbench.bench.sweep.results import RESULTS_FILE, Row

#: what such rows have in the place of an engine's name; none of the engines is called so
ENGINE = "pytest-benchmark"

#: of the list of benchmarks in such a file; our own result rows have no such key
_KEY = "benchmarks"


def benchmark_files(path: Path) -> list[Path]:
    """The files of pytest-benchmark that a path names: itself, or all in a folder that has no rows of ours;
    empty if it names none."""
    if path.is_dir():
        if (path / RESULTS_FILE).exists():
            return []
        return [file for file in sorted(path.glob("*.json")) if _is_one(file)]
    return [path] if path.is_file() and _is_one(path) else []


def _is_one(file: Path) -> bool:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get(_KEY), list)


def read_benchmarks(files: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Rows of the benchmarks in files, and what the files lack, a line each. Several files are rounds of the
    same benchmarks, in the order of their times.

    Raises:
        UserError: a benchmark has no name or no time, or the files are of several commits or machines.
    """
    rounds = []
    for file in files:
        content = json.loads(file.read_bytes())
        try:
            rounds.append(list(_rows(content)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"cannot read {file} as what pytest-benchmark writes ({what})") from error
    made_by = {tuple(row["provenance"].values()) for rows in rounds for row in rows}
    if len(made_by) > 1:
        raise UserError(
            f"{files[0].parent} has benchmarks of several commits or machines; a folder is taken for rounds "
            "of one, so name one file or keep them in a folder each"
        )
    rounds.sort(key=lambda rows: rows[0]["time"] if rows else "")
    rows = merged_rounds(rounds) if len(rounds) > 1 else rounds[0]
    lacking = sum("time_samples_s" not in row["measurement"] for row in rounds[0])
    notes = [f"{lacking} benchmarks of {files[0]} have no samples; --benchmark-save-data keeps them"]
    return rows, notes if lacking else []


def _rows(content: dict[str, Any]) -> Iterator[Row]:
    origin = _provenance(content)
    for found in content[_KEY]:
        stats = found["stats"]
        measured: dict[str, Any] = {"time_s": float(stats["median"])}
        if stats.get("data"):
            measured["time_samples_s"] = [float(sample) for sample in stats["data"]]
        yield {
            "key": found["fullname"],
            "cell": {"engine": ENGINE, "model": found["name"], "group": found.get("group") or ""},
            "status": "ok",
            "reason": "",
            "measurement": measured,
            "time": content.get("datetime") or "",
            "provenance": origin,
        }


def _provenance(content: dict[str, Any]) -> dict[str, str | None]:
    """In the keys of :func:`bench.sweep.provenance.provenance`, with the processor."""
    machine, commit = content.get("machine_info") or {}, content.get("commit_info") or {}
    made_by = str(commit.get("id") or "")[:12]
    return {
        "commit": f"{made_by}-dirty" if made_by and commit.get("dirty") else made_by or None,
        "python": machine.get("python_version"),
        "host": machine.get("node"),
        "cpu": (machine.get("cpu") or {}).get("brand_raw"),
    }
