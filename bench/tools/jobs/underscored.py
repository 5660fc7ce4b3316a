"""Keys with underscores by which programs around Megatron-LM set its arguments: for example
``sequence_parallel: true`` for ``--sequence-parallel``, and ``add_bias_linear: false`` for
``--disable-bias-linear``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from spbench.bench.tools.jobs.account import Account, Given
from spbench.bench.tools.jobs.argument_tables import argument_table, shown
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.megatron import given_argument
from spbench.bench.tools.jobs.variables import variables

#: prefixes of Megatron-LM's switches that turn something off, and prefixes of keys that such switches omit
_OFF, _LEFT_OUT = ("no-", "disable-"), ("", "add-", "apply-")
#: keys whose argument of Megatron-LM has another name, by key
_NAMES = {"fp8": "fp8-format"}


def as_arguments(
    known: Mapping[str, Any], sources: Mapping[str, str], problems: list[str], program: str
) -> Iterator[tuple[str, Given]]:
    """The arguments of Megatron-LM that keys set, as pairs of the argument's name and the argument; keys
    without such an argument are left out.

    Args:
        known: values by key: the program's defaults, its model's, and the job's.
        sources: how the job spells the values that it says, by key.
        problems: a list to which problems with values are added.
        program: the program's name, for the source of a default.
    """
    of_megatron = argument_table("megatron").arguments
    for key, value in known.items():
        name, words = _argument(key, value)
        if name and name in of_megatron:
            given, wrong = given_argument(key, of_megatron[name], words)
            problems += wrong
            source = sources.get(key) or f"{program}'s {key}"
            yield of_megatron[name].name, replace(given, source=source)


def _argument(key: str, value: Any) -> tuple[str, list[str]]:
    """Megatron-LM's argument for a key with a value, and the words behind it; "": no argument is needed."""
    of_megatron = argument_table("megatron").arguments
    word = _NAMES.get(key, key.replace("_", "-"))
    if value is None:
        return "", []
    argument = of_megatron.get(f"--{word}")
    if value in (0, 1) and (argument is None or not argument.takes):
        value = bool(value)
    if isinstance(value, bool):
        if value:
            return (f"--{word}", []) if argument is not None and not argument.takes else ("", [])
        stems = [word.removeprefix(prefix) for prefix in _LEFT_OUT if word.startswith(prefix)]
        off = [f"--{switch}{stem}" for stem in stems for switch in _OFF]
        return next((each for each in off if each in of_megatron), ""), []
    values = value if isinstance(value, list) else [value]
    return f"--{word}", [
        str(int(v) if isinstance(v, float) and v.is_integer() and v > 1 else v) for v in values
    ]


def job_of_both(
    kind: str,
    files: JobFiles,
    gpus: int | None,
    values: Mapping[str, Any],
    megatron: Account,
    own: Account,
    named: Mapping[str, str] | None = None,
) -> Job:
    """The job whose keys are Megatron-LM's arguments (account ``megatron``) or its program's (``own``);
    ``named``: the argument's name with underscores, by a key that is called otherwise."""
    megatron.problems[:0] = own.problems
    megatron.settings += own.settings
    megatron.remarks += own.remarks
    arguments = [*_outcomes(values, megatron, own, named or {}), *variables(megatron)]
    return replace(megatron, table=own.table).job(kind, files, arguments, files.machine_problems(gpus))


def _outcomes(
    values: Mapping[str, Any], megatron: Account, own: Account, named: Mapping[str, str]
) -> Iterator[Argument]:
    """Every key, with the outcome of its argument of Megatron-LM, or of the program's own key (``own``)."""
    accounted = {argument.name: argument for argument in megatron.arguments()}
    of_program = {argument.name: argument for argument in own.arguments()}
    for key, value in values.items():
        word = named.get(key, key)
        name, _ = _argument(word, value)
        argument = accounted.get(word) or of_program.get(key)
        if argument is not None and key in of_program and name not in megatron.given:
            argument = of_program[key]
        if argument is not None:
            yield replace(argument, name=key, value=f"= {shown(value)}")
        elif _is_known(word):
            yield Argument(key, f"= {shown(value)}", "no effect", "is so without it")
        else:
            yield Argument(key, f"= {shown(value)}", "unknown", "")


def _is_known(key: str) -> bool:
    """Whether Megatron-LM has a switch that turns a key on or off."""
    of_megatron = argument_table("megatron").arguments
    word = key.replace("_", "-")
    stems = [word.removeprefix(prefix) for prefix in _LEFT_OUT if word.startswith(prefix)]
    return any(f"--{switch}{stem}" in of_megatron for stem in stems for switch in ("", *_OFF))
