"""Where a result comes from: the code, the libraries and the machine.

What made a row, as a digest: a kept row stands for its cell only while all of that is the same.

The digest has five parts, which are kept apart so that a message can say which one has changed:

- ``cluster``: the figures of the resolved cluster file (``extends`` followed), without sources and notes;
- ``model``, ``strategy``: class and options, the defaults included; ``model`` also has the cell's other
  settings with their defaults, and ``strategy`` the versions of the packages that a peer calls;
- ``code``: what the Python files mean that can change a measurement (:mod:`spbench.bench.measured_code`);
- ``torch``: its version.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.git import DIRTY, checkout_around, commit_of_files, own_checkout
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.devices.nvml import Nvml, NvmlProblem
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measured_code import DIGEST_LENGTH, code_digest, imported_tree, unmeasured_checkout
from spbench.bench.row import FINAL, Row
from spbench.impls.discovery import installed_version
from spbench.impls.models.model import model_preset
from spbench.impls.registries import versions
from spbench.impls.strategies.nesting import nesting


@cache
def machine_facts() -> dict[str, Any]:
    """The facts of this machine, in JSON's types, without importing torch.

    Returns:
        ``os`` (name and release), ``cpu`` (model), ``cores`` (that this process may use), ``memory_bytes``
        (None where the system does not say), ``gpus`` (the names of NVIDIA's, in the driver's order) and
        ``gpu_driver`` (its version; None without one).
    """
    gpus, driver = _gpus()
    return {
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus,
        "gpu_driver": driver,
    }


def cpu_model() -> str:
    """The processor as the system calls it, such as "AMD EPYC"; its architecture where it has no name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """The bytes of main memory; None where the system does not say."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> tuple[list[str], str | None]:
    """The names of NVIDIA's GPUs and the version of their driver; none where that cannot be used."""
    try:
        with Nvml() as library:
            driver = library.read("nvmlSystemGetDriverVersion")
            names = (gpu and library.read("nvmlDeviceGetName", gpu) for gpu in library.gpus())
            return [name or "unknown" for name in names], driver
    except NvmlProblem:
        return [], None


#: what is written from rows and by verification, so that no row depends on it
MADE_FROM_ROWS = ("results/reproduction", "results/baseline", "results/verification", "*.md")

#: the commit of spbench's own code, and that of the project in whose folder it was run
COMMITS = ("commit", "project_commit")


@cache
def provenance() -> dict[str, Any]:
    """What is the same for all rows of a process: versions, host, the ``machine`` (:func:`machine_facts`),
    the ``tree`` that is measured (the folder of spbench's code) and its ``commit`` (None where that is not in
    a checkout), as it was at the first call."""
    own = own_checkout()
    return {
        "spbench": installed_version("spbench"),
        "tree": str(imported_tree()),
        "commit": own and commit_of_files(own, MADE_FROM_ROWS),
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "host": platform.node(),
        "machine": machine_facts(),
    }


def project_commit(folder: Path) -> str | None:
    """The commit that the repository around a folder has now; None where there is none, or it is that of
    spbench's own code, or the folder lies in a checkout of spbench that is not what is measured."""
    root = checkout_around(folder)
    if root is None or root == own_checkout() or unmeasured_checkout(folder):
        return None
    return commit_of_files(root, MADE_FROM_ROWS)


def commit_of(row: Mapping[str, Any]) -> str:
    """The commit that a row stands for: of the project that it was made in, else of spbench's code; empty
    where neither is in a repository."""
    made_by = row.get("provenance") or {}
    return made_by.get("project_commit") or made_by.get("commit") or ""


def check_same_code(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Refuse rows of changed files, and rows of several commits: readers of the numbers must be able to get
    the code that made them all.

    Args:
        rows: by scenario.

    Raises:
        UserError: names the scenario and the mend.
    """
    first: dict[str, tuple[str, str]] = {}
    for scenario, of_scenario in rows.items():
        for row in of_scenario:
            for which in COMMITS:
                commit = (row.get("provenance") or {}).get(which) or ""
                if commit.endswith(DIRTY):
                    raise UserError(
                        f"{scenario}: rows were made by code that is in no commit ({commit}), so that "
                        "nothing is written; commit it, and run again with --fresh"
                    )
                other, first_commit = first.setdefault(which, (scenario, commit))
                if commit != first_commit:
                    raise UserError(
                        f"{scenario}: rows were made by commit {commit or 'unknown'}, those of {other} by "
                        f"{first_commit or 'unknown'}, so that nothing is written; run again with --fresh"
                    )


PARTS = ("cluster", "model", "strategy", "code", "torch")

#: gives the digest of a cell
Digesting = Callable[[Cell], Mapping[str, str]]

#: keys of a cluster file that say where a figure comes from
_ABOUT_FIGURES = ("name", "about", "source", "note", "fitted_on", "inferred_from", "measured")


def digest(cell: Cell) -> dict[str, str]:
    """The digest of a cell as it would be measured now: a text for each of :data:`PARTS`.

    Raises:
        UserError: the cell's cluster file cannot be read.
        KeyError: an unknown model or strategy.
    """
    cluster = load_cluster(cell.cluster).model_dump(mode="json")
    return {
        "cluster": _sha256(_without_texts(cluster)),
        "model": _sha256([*_model(*cell.model_arguments), cell.model_dump(mode="json")]),
        "strategy": _sha256(_strategy(cell.strategy, cell.strategy_options)),
        "code": code_digest(),
        "torch": installed_version("torch") or "",
    }


def digests_of_a_run() -> Digesting:
    """Gives the :func:`digest` that each cell had when it was first asked for, by the cell's key."""
    digests: dict[str, Mapping[str, str]] = {}

    def of(cell: Cell) -> Mapping[str, str]:
        if (key := cell.key) not in digests:
            digests[key] = digest(cell)
        return digests[key]

    return of


def _model(name: str, options: Mapping[str, Any], config: Mapping[str, Any] | None) -> list[Any]:
    """The class of a model, and all of its options with some changed."""
    model = model_preset(name, options, config)
    values = {field.name: getattr(model, field.name) for field in fields(model)}  # type: ignore[arg-type]
    return _plain([_path_of(type(model)), values])


def _strategy(name: str, options: Mapping[str, Any]) -> list[Any]:
    """The classes of a strategy, all of its options with some changed, and the versions of the packages that
    a peer calls."""
    strategies = nesting(name)
    classes = [_path_of(cls) for cls in strategies.classes]
    packages = versions(strategies.requires)
    return [*_plain([*classes, asdict(strategies.options_type()) | dict(options)]), *filter(None, [packages])]


def changed_parts(cell: Cell, row: Row, digest_of: Digesting = digest) -> list[str]:
    """The parts of the digest in which a row differs from the cell as it would be measured now.

    A row without a digest, of an older version, differs in all.
    """
    now = digest_of(cell)
    return [p for p in PARTS if not isinstance(row.digest, Mapping) or row.digest.get(p) != now[p]]


def is_current(cell: Cell, row: Row | None, digest_of: Digesting = digest) -> bool:
    """Whether there is a row, and what made it is the same as now."""
    return row is not None and not changed_parts(cell, row, digest_of)


def is_final(cell: Cell, row: Row | None, digest_of: Digesting = digest) -> bool:
    """Whether the row answers the cell, so that a sweep leaves it as it is."""
    is_a_result = row is not None and row.status in FINAL and row.final
    return is_a_result and is_current(cell, row, digest_of)


def outdated(cells: Iterable[Cell], rows: Mapping[str, Row], digest_of: Digesting = digest) -> str:
    """A line on the earlier results that must be run again because what made them has changed: how many of
    all that are final, and how often each part of the digest has changed; "" if there are none.

    Args:
        rows: by key; those of other cells are left out.
    """
    final = [(cell, row) for cell in cells if (row := rows.get(cell.key)) and row.status in FINAL]
    changed = (changed_parts(cell, row, digest_of) for cell, row in final)
    counts = Counter(_spelled(parts) for parts in changed if parts)
    if not counts:
        return ""
    why = ", ".join(f"{parts} ({number})" for parts, number in counts.most_common())
    return f"{counts.total()} of {len(final)} earlier results are out of date and run again; changed: {why}"


def _spelled(parts: list[str]) -> str:
    return "made by a version without digests" if len(parts) == len(PARTS) else " and ".join(parts)


def _without_texts(cluster: Any) -> Any:
    if isinstance(cluster, dict):
        return {key: _without_texts(value) for key, value in cluster.items() if key not in _ABOUT_FIGURES}
    return cluster


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain(content: Any) -> Any:
    """As JSON gives it back, which has the same digest."""
    return json.loads(json.dumps(content, default=repr))


def _sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
