"""Jobs of programs that need no reader of their own, because the program's table says everything: the
signature of a job's files, their keys, the fields of a step that the keys say, and each key's outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import (
    OF_DEEPSPEED,
    ArgumentTable,
    flat,
    program_table,
    table_content,
)
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles, mapping_in
from spbench.bench.tools.jobs.launch import program_launch, values_of_launch
from spbench.bench.tools.jobs.rules import follow
from spbench.bench.tools.jobs.step_lines import step_of
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.variables import variables


def __getattr__(kind: str) -> Callable[[JobFiles], Job | None]:
    """The function that reads the jobs of a program, whose table has the name ``kind``."""
    if kind.startswith("_"):
        raise AttributeError(kind)
    return partial(read_by_table, kind)


def read_by_table(kind: str, files: JobFiles) -> Job | None:
    """The job in these files by the table KIND.yaml; None if the files are of another program. UserError if a
    file is damaged, or a script has several commands that train."""
    reads = _of_script if "launch" in table_content(kind) else _of_configuration
    account = reads(kind, files)
    if account is None:
        return None
    content = account.table.content
    if key := content.get("environment"):
        account.environment = {str(name): str(value) for name, value in (account.value(key) or {}).items()}
    follow(account, content.get("rules", ()))
    set_step(account, step_of(account), files)
    if not_said := account.facts.get("not_said"):
        account.problems.append(not_said)
    return account.job(kind, files, [*account.arguments(), *variables(account)])


def _of_configuration(kind: str, files: JobFiles) -> Account | None:
    """The account of a configuration's keys; None if it has the signature of no version of the program."""
    content = table_content(kind)
    keys = content["signature"]["keys"]
    versions = keys if isinstance(keys, Mapping) else {"": keys}
    contents = {version: files.configuration(signs) for version, signs in versions.items()}
    version = next((version for version, content in contents.items() if content is not None), None)
    if version is None or (configuration := contents[version]) is None:
        return None
    table = program_table(kind, version)
    account = key_account(
        table,
        _values_of(files, configuration, table),
        lambda name: name in table.arguments or not fnmatchcase(name, content.get("left_out", "")),
        overrides=files.environment,
    )
    account.facts["version"] = version
    return account


def _values_of(
    files: JobFiles, content: Mapping[str, Any], table: ArgumentTable
) -> Iterator[tuple[str, Any]]:
    """Pairs of name and value from the program's configuration, and then from DeepSpeed's."""
    yield from flat(content, table.arguments)
    for file in files.files:
        beside = mapping_in(file) or {}
        if "zero_optimization" in beside and beside is not content:
            yield from flat(beside, table.arguments, OF_DEEPSPEED)


def _of_script(kind: str, files: JobFiles) -> Account | None:
    """The account of a script's command that starts the program; None if the script has no such command."""
    content, table = table_content(kind), program_table(kind)
    if (launch := program_launch(files, content["launch"])) is None:
        return None
    problems: list[str] = []
    values, is_older = values_of_launch(launch, content, table, problems)
    account = key_account(table, values.items(), overrides=files.environment)
    account.environment = launch.environment
    account.problems += problems
    account.facts |= {"gpus": launch.gpus, "older": is_older}
    if files.gpus is None and launch.gpus is None:
        account.facts["not_said"] = launch.not_said
    return account
