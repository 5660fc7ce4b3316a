"""Jobs of training programs as scenarios: every argument is mapped, without effect, or refused by name.

A kind of job is a function ``read(files)`` that makes a :class:`Job` of :class:`JobFiles`, or returns None
where they are of another kind. The kind called NAME is such a function in the module NAME of this package,
or of another distribution in an entry point NAME of the group ``spbench.jobs``; or the table NAME.yaml of
this package, where that has a line ``about``: :mod:`~spbench.bench.tools.jobs.programs` reads its jobs.

The way back is a function ``flags(cell)`` that makes :class:`Flags`, in the module to_NAME;
:func:`program_flags` proves and completes these flags.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from spbench.bench.yaml_files import parse_yaml
from spbench.impls import FunctionModules


class Jobs(FunctionModules):
    """The readers of jobs: functions of modules, and tables."""

    def tables(self) -> dict[str, str]:
        """The one-line description of each table, its line ``about``, by the table's name."""
        paths = sorted(Path(__file__).parent.glob("*.yaml"))
        return {path.stem: about for path in paths if (about := _about(path))}

    def signature(self, name: str) -> Mapping[str, Any]:
        """The keys or regular expressions by which :func:`may_be` tells that files are jobs of kind ``name``,
        from the kind's table; empty where only the kind's reader can tell."""
        return _signature(Path(__file__).with_name(f"{name}.yaml"))

    def summaries(self) -> dict[str, str]:
        return {**super().summaries(), **self.tables()}

    def docstrings(self) -> dict[str, str]:
        return {**super().docstrings(), **self.tables()}

    def _places(self) -> Sequence[EntryPoint]:
        tables = [EntryPoint(name, f"{__name__}.programs:{name}", self.group) for name in self.tables()]
        return sorted([*super()._places(), *tables], key=lambda place: (place.name, place.value))


@cache
def _signature(path: Path) -> Mapping[str, Any]:
    """The section ``signature`` of a table's file; only that section is parsed, to save time."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    section = re.search(r"^signature:\n(?:[ -].*\n)+", text, re.MULTILINE)
    return parse_yaml(path, section[0].encode())["signature"] if section else {}


@cache
def _about(path: Path) -> str:
    """The text of a table's line ``about``; "" where the table has no such line."""
    line = re.search(r'^about: "?(.+?)"?$', path.read_text(encoding="utf-8"), re.MULTILINE)
    return line[1] if line else ""


JOBS = Jobs(__name__, "*", "read", "jobs", "spbench.jobs")
FLAGS = FunctionModules(__name__, "to_*", "flags", "flags")
