"""Jobs of Primus by torchtitan: the keys of its experiments are torchtitan's, with some of its own beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from spbench.bench.errors import suggestion
from spbench.bench.tools.jobs.argument_tables import argument_table, shown
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.torchtitan import TorchtitanJob

_EIGHT_BITS, _CONVERTERS = "-fp8", ["quantize.linear.float8"]


def torchtitan_job(model: str, overrides: Mapping[str, Any], files: JobFiles, problems: list[str]) -> Job:
    """The job of an experiment whose framework is torchtitan.

    Args:
        model: its model's file.
        overrides: its keys, with their variables in place.
        problems: of the variables.
    """
    table = argument_table("primus_torchtitan")
    models: Mapping[str, str] = table.content["models"]
    name = PurePosixPath(model).name.removesuffix(".yaml")
    plain = name.removesuffix(_EIGHT_BITS)
    if plain not in models:
        near = suggestion(name, [*models])
        problems.append(f"model {shown(model)} is none of Primus's own for torchtitan{near}")
    family, flavor = models.get(plain, next(iter(models.values()))).split()
    sections: dict[str, Any] = {"model": {"name": family, "flavor": flavor}}
    if name != plain:
        sections["model"]["converters"] = _CONVERTERS
    for section, values in [*table.content["defaults"].items(), *overrides.items()]:
        both = isinstance(values, Mapping) and isinstance(sections.get(section, {}), Mapping)
        sections[section] = {**sections.get(section, {}), **values} if both else values
    job = TorchtitanJob(sections, files, launched=False)
    k = job.keys
    k.table = replace(k.table, program=table.program, arguments={**k.table.arguments, **table.arguments})
    own = ((n, each.wrong(k.given[n].value)) for n, each in table.arguments.items() if n in k.given)
    k.problems += [f"{n}: {wrong}" for n, wrong in own if wrong]
    k.problems[:0] = problems
    return replace(job.job(), kind="primus")
