"""Write tests/api/public_names.txt, the names that users can rely on until the next major version.

    python scripts/public_names.py

The names are those of `import spbench`, the commands with their options and arguments, the strategies,
backends, models, clusters and scenarios, the settings of scenarios and cells, the keys of cluster files, and
the fields of rows and of the JSON of `spbench fit` and `spbench advise`. A minor version may add names, and
may change simulated numbers; a name goes only in a major version, or before 1.0 in a minor one, and a line of
CHANGELOG.md or .changes says so.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
from pydantic import BaseModel
from typing_extensions import is_typeddict

import spbench
from scripts import schemas
from spbench import impls
from spbench.bench.command_line.cli import COMMANDS
from spbench.bench.measure import Cluster
from spbench.bench.row import Row

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "api" / "public_names.txt"


def public_names() -> list[str]:
    """The names, each with its kind, sorted: "option fit --cluster", "row measurement.peak_memory_bytes"."""
    names = {f"python spbench.{name}" for name in spbench.__all__}
    for command in COMMANDS.names():
        names.add(f"command {command}")
        for parameter in COMMANDS.load(command).params:
            kind, words = "option", parameter.opts
            if isinstance(parameter, click.Argument):
                kind, words = "argument", [(parameter.name or "").upper()]
            names |= {f"{kind} {command} {word}" for word in words}
    scenario = schemas.scenario()
    settings = {**scenario["properties"], **scenario["$defs"]["Group"]["properties"]}
    names |= {f"scenario {name}" for name in settings}
    for command, schema in (("fit", schemas.fit()), ("advise", schemas.advise())):
        names |= {f"json {command} {name}" for name in _properties(schema)}
    rows = (name for name in _fields(Row) if not name.startswith("rounds."))  # which are measurements too
    names |= {f"row {name}" for name in rows} | {f"cluster {name}" for name in _fields(Cluster)}
    for room in ("scenarios", "scenarios/clusters"):
        names |= {f"file {path.relative_to(ROOT)}" for path in (ROOT / room).glob("*.yaml")}
    for kind, registry in (
        ("strategy", impls.all_strategies()),
        ("backend", impls.all_backends()),
        ("model", impls.all_models()),
    ):
        names |= {f"{kind} {name}" for name in registry}
    return sorted(names)


def _properties(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        yield prefix + name
        yield from _properties(inner, f"{prefix}{name}.")
    if isinstance(schema.get("items"), dict):
        yield from _properties(schema["items"], prefix)


def _fields(kind: Any, prefix: str = "") -> Iterator[str]:
    """The fields of a pydantic model or a typed dictionary, and of those within it, as paths."""
    if not (is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel))):
        for inner in get_args(kind):
            yield from _fields(inner, prefix)
        return
    fields = {} if is_typeddict(kind) else kind.model_fields
    hints = get_type_hints(kind)
    if (
        prefix and {"value", "source"} <= hints.keys()
    ):  # a number with its source; all of them have these keys
        yield from (f"(a number).{name}" for name in hints if name != "inferred_from")
        return
    for name in fields or hints:
        alias = fields[name].alias if name in fields else None
        yield prefix + (alias or name)
        yield from _fields(hints[name], f"{prefix}{alias or name}.")


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}\n" for name in public_names()), encoding="utf-8")
