"""What made a row, as a digest: a kept row stands for its cell only while all of that is the same.

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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measured_code import DIGEST_LENGTH, code_digest
from spbench.bench.row import FINAL, Row
from spbench.impls.discovery import installed_version
from spbench.impls.models.model import model_preset
from spbench.impls.registries import versions
from spbench.impls.strategies.nesting import nesting

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
