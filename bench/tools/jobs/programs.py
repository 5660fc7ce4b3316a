"""Jobs of programs that need no reader of their own, because the program's table says everything: the
signature of a job's files, their keys, the fields of a step that the keys say, and each key's outcome.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from spbench.bench.files import read_file
from spbench.bench.tools.jobs import argument_tables
from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles, mapping_in
from spbench.bench.tools.jobs.launch import program_launch, values_of_launch
from spbench.bench.tools.jobs.megatron_inside import job_by_megatron
from spbench.bench.tools.jobs.python_values import assigned_once, constants, is_unknown, syntax_of, value_of
from spbench.bench.tools.jobs.rules import Rule, follow, holds, said_of
from spbench.bench.tools.jobs.step_lines import step_of
from spbench.bench.tools.jobs.torchtitan import job_around
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.variables import variables
from spbench.bench.yaml_files import merge, nested, parse_yaml

#: ``${KEY.KEY}``, the value of another key; a product or sum of two numbers; and how deep values may nest
_NAMED, _COMPUTED = re.compile(r"\$\{([\w.]+)\}"), re.compile(r"\$\{(mul|sum):\s*(\d+),\s*(\d+)\}")
_MOST_NAMED = 5


def __getattr__(kind: str) -> Callable[[JobFiles], Job | None]:
    """The function that reads the jobs of a program, whose table has the name ``kind``."""
    if kind.startswith("_"):
        raise AttributeError(kind)
    return partial(read_by_table, kind)


def read_by_table(kind: str, files: JobFiles) -> Job | None:
    """The job in these files by the table KIND.yaml; None if the files are of another program. UserError if a
    file is damaged, or a script has several commands that train."""
    content = argument_tables.table_content(kind)
    by_section = {"launch": _of_script, "python": _of_python}
    account = next((by_section[e] for e in by_section if e in content), _of_configuration)(kind, files)
    if account is None:
        return None
    if key := content.get("environment"):
        account.environment = {str(name): str(value) for name, value in (account.value(key) or {}).items()}
    account.facts["asked_gpus"] = files.gpus
    if lines := content.get("layout"):
        files = _with_layout(files, account, lines)
    follow(account, content.get("rules", ()))
    if (by_megatron := content.get("megatron")) and holds(account, by_megatron.get("if", "")):
        return job_by_megatron(kind, files, account)
    if by_torchtitan := content.get("torchtitan"):
        return _job_by_torchtitan(kind, files, account, by_torchtitan)
    if by_megatron:  # arguments of Megatron-LM are idle beside FSDP
        sections = tuple(by_megatron["sections"].split())
        table = account.program_arguments
        account.given = {n: g for n, g in account.given.items() if n in table or not n.startswith(sections)}
    set_step(account, step_of(account), files)
    if not_said := account.facts.get("not_said"):
        account.problems.append(not_said)
    return account.job(kind, files, [*account.arguments(), *variables(account)])


def _with_layout(files: JobFiles, account: Account, lines: Sequence[Rule]) -> JobFiles:
    """The files with the number of GPUs that a layout in them has, the product of the values of ``lines``;
    a remark if the command says another number, of which the others then do something else."""
    values = [said_of(account, line).value for line in lines]
    if not all(isinstance(each, int) and each > 0 for each in values):
        return files
    gpus = math.prod(values)
    if files.gpus not in (None, gpus):
        account.remarks.append(f"{gpus} GPUs train, as the layout of the files says, not {files.gpus}")
    return replace(files, gpus=gpus)


def _of_configuration(kind: str, files: JobFiles) -> Account | None:
    """The account of a configuration's keys; None if it has the signature of no version of the program."""
    content = argument_tables.table_content(kind)
    keys = content["signature"]["keys"]
    versions = keys if isinstance(keys, Mapping) else {"": keys}
    contents = {version: files.configuration(signs) for version, signs in versions.items()}
    version = next((version for version, content in contents.items() if content is not None), None)
    if version is None or (configuration := contents[version]) is None:
        return None
    table = argument_tables.program_table(kind, version)
    if follows := content.get("follows"):
        whole = _whole(files, configuration, follows)
        configuration = _resolved(whole, whole)
    account = key_account(
        table,
        _values_of(files, configuration, table),
        lambda name: _counts(name, table),
        overrides=files.environment,
    )
    account.facts["version"] = version
    return account


def _counts(name: str, table: argument_tables.ArgumentTable) -> bool:
    """Whether a key is not of a part of the program that the table's line ``left_out`` leaves out."""
    patterns = table.content.get("left_out", "").split()
    return name in table.arguments or not any(fnmatchcase(name, each) for each in patterns)


def _whole(
    files: JobFiles, content: Mapping[str, Any], follows: str, beside: Path | None = None
) -> dict[str, Any]:
    """A configuration over those that its key ``follows`` names, by paths beside its own (``beside``).
    UserError if such a file cannot be read."""
    folder = beside or next((file.path.parent for file in files.files if mapping_in(file) == content), Path())
    above = content.get(follows, [])
    whole: dict[str, Any] = {}
    for name in [above] if isinstance(above, str) else above:
        path = folder / str(name)
        whole = merge(whole, _whole(files, parse_yaml(path, read_file(path)), follows, path.parent))
    return merge(whole, {key: value for key, value in content.items() if key != follows})


def _resolved(value: Any, whole: Mapping[str, Any], depth: int = 0) -> Any:
    """A value in which what it names in ``whole`` replaces each ``${KEY.KEY}``, and a number ``${mul:N,N}``
    or ``${sum:N,N}``; what is named nowhere stays."""
    if isinstance(value, Mapping):
        return {key: _resolved(each, whole, depth) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, whole, depth) for each in value]
    if not isinstance(value, str) or "${" not in value or depth > _MOST_NAMED:
        return value

    def named(match: re.Match[str]) -> Any:
        keys = match[1].split(".")
        value_there: Any = whole
        for key in keys:
            value_there = value_there.get(key) if isinstance(value_there, Mapping) else None
        return match[0] if value_there is None else _resolved(value_there, whole, depth + 1)

    if alone := _NAMED.fullmatch(value):
        return named(alone)
    text = _NAMED.sub(lambda match: str(named(match)), value)
    if computed := _COMPUTED.fullmatch(text):
        numbers = int(computed[2]), int(computed[3])
        return sum(numbers) if computed[1] == "sum" else math.prod(numbers)
    return text


def _job_by_torchtitan(kind: str, files: JobFiles, own: Account, section: Mapping[str, Any]) -> Job:
    """The job of a program that trains by torchtitan, whose keys beside its own (``own``) are torchtitan's;
    ``section``: the key with the number of ``gpus``."""
    others = ((name, given.value) for name, given in own.given.items() if name not in own.program_arguments)
    sections = nested(others)
    gpus, key = own.chosen(*section["gpus"].split())
    own.took("how many GPUs there are", key)
    gpus = files.gpus or gpus
    return job_around(kind, own.table, sections, replace(files, gpus=gpus), own)


def _values_of(
    files: JobFiles, content: Mapping[str, Any], table: argument_tables.ArgumentTable
) -> Iterator[tuple[str, Any]]:
    """Pairs of name and value from the program's configuration, whose trainer may be in a section of its own
    (the table's line ``inside``), and then from DeepSpeed's."""
    inside = content.get(table.content.get("inside", ""))
    if isinstance(inside, Mapping):
        content = merge({k: v for k, v in content.items() if v is not inside}, inside)
    yield from argument_tables.flat(content, table.arguments)
    for file in files.files:
        beside = mapping_in(file) or {}
        if "zero_optimization" in beside and "zero_optimization" not in content:
            yield from argument_tables.flat(beside, table.arguments, argument_tables.OF_DEEPSPEED)


def _of_python(kind: str, files: JobFiles) -> Account | None:
    """The account of the keywords of calls in a Python file, by the table's line ``python``; None if there is
    no such file, or not the first of these calls."""
    content, table = argument_tables.table_content(kind), argument_tables.program_table(kind)
    scripts = [file for file in files.files if file.path.suffix == ".py"]
    calls: Mapping[str, str] = content["python"]
    if len(scripts) != 1 or not (said := _settings_of_calls(scripts[0], calls, files.environment)):
        return None
    kept = [(name, value) for name, value in said.items() if _counts(name, table)]
    return (
        key_account(table, kept, overrides=files.environment) if next(iter(calls.values())) in said else None
    )


def _settings_of_calls(
    file: JobFile, calls: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """The keywords of calls in a script, by names with dots: ``calls`` has a name by a pattern of the called
    function, and the value of that name is the function. A keyword that is a call is such a name too; so is
    an attribute that the script sets. UserError if the script is no Python."""
    tree = syntax_of(file)
    names, nodes = constants(tree, environment), assigned_once(tree)
    settings: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            settings |= _settings(node.value, ast.unparse(node.targets[0]), names, nodes)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            for name in (name for pattern, name in calls.items() if re.fullmatch(pattern, called)):
                settings |= _settings(node, name, names, nodes)
    return settings


def _settings(
    node: ast.expr, name: str, names: Mapping[str, Any], nodes: Mapping[str, ast.expr]
) -> Iterator[tuple[str, Any]]:
    """Pairs of a dotted name and a value: of an expression, and of the keywords of a call in it."""
    node = nodes.get(node.id, node) if isinstance(node, ast.Name) and node.id not in names else node
    value = value_of(node, names)
    if isinstance(node, ast.Call) and is_unknown(value):
        yield name, ast.unparse(node.func)
        for keyword in node.keywords:
            yield from _settings(keyword.value, f"{name}.{keyword.arg}", names, nodes)
    else:
        plain = isinstance(node, ast.Attribute | ast.BinOp) and is_unknown(value)
        yield name, ast.unparse(node) if plain else value


def _of_script(kind: str, files: JobFiles) -> Account | None:
    """The account of a script's command that starts the program; None if the script has no such command."""
    content, table = argument_tables.table_content(kind), argument_tables.program_table(kind)
    if (launch := program_launch(files, content["launch"])) is None:
        return None
    problems: list[str] = []
    if files.gpus is not None:
        counts = {*content["launch"].get("counts", "").split()}
        kept = [word for word in launch.arguments if word.partition("=")[0].lstrip("+") not in counts]
        launch = replace(launch, arguments=kept)
    values, is_older = values_of_launch(launch, content, table, problems)
    counted = [(name, value) for name, value in values.items() if _counts(name, table)]
    account = key_account(table, counted, overrides=files.environment)
    account.environment = launch.environment
    account.problems += problems
    account.facts |= {"gpus": launch.gpus, "older": is_older}
    if files.gpus is None and launch.gpus is None:
        account.facts["not_said"] = launch.not_said
    return account
