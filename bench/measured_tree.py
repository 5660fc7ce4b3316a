"""The tree of files that is measured, beside the checkout of spbench in whose folder a command is run.

`spbench` measures the files that Python imports. After `pip install .` these are a copy, so that a change of
the checkout is neither run nor judged; an editable install imports the checkout itself.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.measuring_code import digests_by_name

#: the folder of a checkout that has the files of each baseline, in a folder of its scenario's name
BASELINES = Path("results", "baseline")

#: what a row and its comparison with published numbers rest on: folders, and the files in them
_MEASURED = (
    *(("impls", "*.py"), ("bench", "*.py"), ("bench", "*.yaml"), ("bench", "*.json")),
    ("scenarios", "*.yaml"),
    *(("results/papers", "*.csv"), ("results/measured", "*.csv"), ("results/field", "*.csv")),
)
#: a folder with all of these is a checkout of spbench
_MARKS = ("pyproject.toml", "bench/measuring_code.py", "impls/registries.py", "scenarios")


def imported_tree() -> Path:
    """The folder above the rooms that are imported: a checkout, or ``site-packages/spbench``."""
    return Path(__file__).resolve().parents[1]


def checkout_of(folder: Path) -> Path | None:
    """The root of the checkout of spbench that a folder lies in; None: it lies in none."""
    here = folder.resolve()
    return next((at for at in (here, *here.parents) if all((at / mark).exists() for mark in _MARKS)), None)


def differing_files(tree: Path, other: Path) -> list[str]:
    """The names, below either tree, of the measured files that differ in what they mean, or that only one
    has."""
    a, b = (digests_by_name(root, _measured_files(root)) for root in (tree, other))
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


def _measured_files(root: Path) -> set[Path]:
    return {path for folder, pattern in _MEASURED for path in (root / folder).rglob(pattern)}


@cache
def unmeasured_checkout(folder: Path) -> str:
    """What there is to say where a folder lies in a checkout of spbench whose files are not those that are
    measured; "" where they mean the same, and where the folder lies in none."""
    checkout, tree = checkout_of(folder), imported_tree()
    if checkout is None or checkout == tree or not (names := differing_files(tree, checkout)):
        return ""
    more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
    shown = os.path.relpath(tree, checkout) if tree.is_relative_to(checkout) else tree
    return f"measured: {shown}, which differs from this checkout, {checkout}, in {names[0]}{more}"


def refuse_unmeasured_checkout(folder: Path, gate: str) -> None:
    """Refuse what stands for the code of the checkout around a folder, and would be of other code.

    Args:
        gate: what is refused, such as "the gate"; the subject of the message.

    Raises:
        UserError: the checkout's files are not those that are measured.
    """
    if said := unmeasured_checkout(folder):
        raise UserError(
            f"{gate} would be of other code than this checkout's ({said}); run  pip install -e .  "
            "in the checkout, so that its own files are measured"
        )


def has_baseline(scenario: str, folder: Path) -> bool:
    """Whether the checkout of spbench around a folder has a committed baseline of a scenario."""
    checkout = checkout_of(folder)
    return checkout is not None and (checkout / BASELINES / scenario).is_dir()


def is_baseline(path: Path, folder: Path) -> bool:
    """Whether a path lies among the committed baselines of the checkout of spbench around a folder."""
    checkout = checkout_of(folder)
    return checkout is not None and path.resolve().is_relative_to(checkout / BASELINES)
