"""Jobs of Megatron-LM: a launch script or command line of pretrain_gpt.py or pretrain_bert.py, or the YAML of
one of its functional tests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.launch import Launch, launched
from spbench.bench.tools.jobs.megatron_arguments import parse, program
from spbench.bench.tools.jobs.megatron_container import CONTAINER, container_problems
from spbench.bench.tools.jobs.megatron_model import model_name, set_model
from spbench.bench.tools.jobs.megatron_stages import set_schedule
from spbench.bench.tools.jobs.megatron_training import set_batch, set_optimizer, set_parallelism
from spbench.bench.tools.jobs.megatron_translation import Translation
from spbench.bench.tools.jobs.shell import Shell
from spbench.bench.tools.jobs.shell_words import ShellError
from spbench.bench.tools.jobs.variables import variables
from spbench.bench.yaml_files import parse_yaml

_PROGRAMS = re.compile(r"(pretrain|train|finetune)_\w+\.py")
_TRAINS = {"pretrain_gpt.py": False, "pretrain_bert.py": True}
#: of a functional test
_ARGUMENTS, _VARIABLES = "MODEL_ARGS", "ENV_VARS"


def read(files: JobFiles) -> Job | None:
    """A job of Megatron-LM; None where the file starts none of its programs.

    Raises:
        UserError: the file cannot be read, is damaged, or starts several programs.
    """
    file = files.the_file()
    launch = _test(file, files.environment) if _is_yaml(file) else None
    launch = launch or launched(file, _PROGRAMS, files.environment)
    if launch is None:
        return None
    bert = _TRAINS.get(launch.program, False)
    given = parse(launch.arguments)
    t = Translation(given, launch.environment)
    gpus = files.gpus if files.gpus is not None else launch.gpus
    problems = files.machine_problems(gpus)
    if launch.not_said and gpus is None:
        problems[0] += f" ({launch.not_said})"
    if launch.program not in _TRAINS:
        problems.insert(0, f"{launch.program} is none of {' and '.join(_TRAINS)}")
    if not given.problems:
        set_model(t, bert=bert, cluster=files.cluster)
        replicas = set_parallelism(t, gpus)
        set_batch(t, replicas)
        set_schedule(t)
        set_optimizer(t, files.cluster)
        t.problems += container_problems(t)
    t.ignore("what the job needs of it is the same in all releases", CONTAINER)
    if (workspace := "CUBLAS_WORKSPACE_CONFIG") not in t.made_of:
        t.took("not before the arguments are right", workspace)
    arguments = [*t.arguments(model_name(bert)), *variables(t, t.environment)]
    t.problems[:0] = given.problems
    return t.job("megatron", program(), files, arguments, problems)


def _is_yaml(file: JobFile) -> bool:
    return file.path.suffix in (".yaml", ".yml") or bool(
        re.search(rf"^{_ARGUMENTS}:", file.text, re.MULTILINE)
    )


def _test(file: JobFile, environment: Mapping[str, str]) -> Launch | None:
    """The arguments of a functional test; of BERT where the folder of its family says so."""
    content = parse_yaml(file.path, file.content)
    arguments, variables = content.get(_ARGUMENTS), content.get(_VARIABLES) or {}
    if arguments is None:
        return None
    for section, found in ((_ARGUMENTS, arguments), (_VARIABLES, variables)):
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise file.wrong(f"{section}: a mapping of names to values is needed")
    shell = Shell(dict(environment))
    try:
        texts = {name: shell.expand_text(_text(value)) for name, value in variables.items()}
        shell.variables.update(texts)
        words = [word for name, value in arguments.items() for word in _words(shell, name, value)]
    except ShellError as error:
        raise file.wrong(str(error)) from error
    bert = "bert" in file.path.parts[:-1]
    exported = {**environment, **texts}
    return Launch(1, "pretrain_bert.py" if bert else "pretrain_gpt.py", words, exported, None)


def _words(shell: Shell, name: str, value: Any) -> Sequence[str]:
    """The words of one argument of a functional test: `true` is a switch, of which `false` leaves it out."""
    name = name if name.startswith("--") else f"--{name}"
    if value is True:
        return [name]
    if value is False or value is None:
        return []
    values = value if isinstance(value, list) else [_text(value)]
    if isinstance(value, str) and (listed := re.fullmatch(r"\[([^][]*)\]|([\d ]+)", value.strip())):
        values = (listed[1] or listed[2] or "").split()
    return [name, *(shell.expand_text(_text(each)) for each in values)]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
