"""Result rows that are made up, and folders of them."""

import copy
import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spbench.bench.tools.papers.comparison import Comparison, write
from tests.grid import data

Rows = list[dict[str, Any]]

SAMPLES = [0.5, 0.25, 0.125, 0.25, 0.25]

CLAIM = Comparison(**data(__file__)["CLAIM"])


def raw(key: str, engine: str = "virtual", status: str = "ok", **entries: Any) -> dict[str, Any]:
    """A row as its line in a file has it; ``entries`` besides its cell, such as the measurement."""
    return {"key": key, "cell": {"engine": engine}, "status": status, "reason": "", **entries}


def made_up(name: str, status: str = "ok", engine: str = "virtual", **measured: Any) -> dict[str, Any]:
    """A row of a step on two ranks; of a cell that did not run, without numbers."""
    entries: dict[str, Any] = copy.deepcopy(data(__file__)["made_up"])
    entries["cell"]["engine"] = engine
    entries["reason"] = "" if status == "ok" else f"planted: {status}"
    samples = {"step_time_samples_s": SAMPLES} if engine == "distributed" else {}
    entries["measurement"] = entries["measurement"] | samples | measured if status == "ok" else measured
    return raw(name, engine, status) | entries


def folder(path: Path, rows: Iterable[dict[str, Any]], *claims: Comparison) -> Path:
    """Write rows, and claims if there are any, as a run leaves them."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if claims:
        write(claims, path)
    return path


#: of every kind: exact, measured, out of memory with and without numbers, impossible, failed
EVERYTHING = [
    made_up("a/exact"),
    made_up("b/measured", engine="distributed"),
    made_up("c/found", answer=4096, step_time_s=None, tokens_per_s=None)
    | {"cell": made_up("")["cell"] | {"search": {"quantity": "seq_len"}}},
    made_up("d/oom", "oom", peak_memory_bytes=2**35),
    made_up("e/bare oom", "oom"),
    made_up("f/unsupported", "unsupported"),
    made_up("g/failed", "failed"),
]

#: what the gate knows
BASE = [made_up("a"), made_up("b"), made_up("c", "oom", peak_memory_bytes=2**35)]


def planted(change: Callable[[Rows], Any]) -> Rows:
    rows = copy.deepcopy(BASE)
    change(rows)
    return rows


def one_byte_more(rows: Rows) -> None:
    rows[0]["measurement"]["communication"][0]["sent_bytes"] += 1


def git(repository: Path, *arguments: str) -> str:
    """What git prints in a repository."""
    identity = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    command = ["git", "-C", str(repository), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit_all(repository: Path) -> str:
    """Commit what a folder has, which becomes a repository if it is none; returns the hash."""
    if not (repository / ".git").exists():
        git(repository, "init", "-q", "-b", "main")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "a change")
    return git(repository, "rev-parse", "HEAD")


# -- rows of three cells with two claims, for the gate --------------------------------------------------

Change = Callable[[list[dict[str, Any]]], Any]


def row(name: str, **measured: Any) -> dict[str, Any]:
    entries: dict[str, Any] = copy.deepcopy(data(__file__)["row"])
    entries["measurement"] |= measured
    return raw(name, "distributed" if "gloo" in name else "virtual", **entries)


ROWS = [row("a"), row("b"), row("c/gloo")]


ENTRY = replace(CLAIM, claim="ratio", variant="v")

TABLE = replace(ENTRY, **data(__file__)["TABLE"])


def judged_folder(path: Path, rows: Rows, *entries: Comparison) -> Path:
    """A folder of results, whose claims are the two above unless said otherwise."""
    return folder(path, rows, *(entries or (ENTRY, TABLE)))
