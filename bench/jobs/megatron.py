"""Jobs of Megatron-LM: a launch script or command line of pretrain_gpt.py or pretrain_bert.py, or the YAML of
one of its functional tests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.jobs.job import Argument, Job
from spbench.bench.jobs.job_files import JobFile, JobFiles
from spbench.bench.jobs.launch import Launch, launched
from spbench.bench.jobs.megatron_arguments import parse, program
from spbench.bench.jobs.megatron_container import CONTAINER, container_problems
from spbench.bench.jobs.megatron_model import model_name, set_model
from spbench.bench.jobs.megatron_stages import set_schedule
from spbench.bench.jobs.megatron_training import set_batch, set_optimizer, set_parallelism
from spbench.bench.jobs.megatron_translation import Translation
from spbench.bench.jobs.shell import Shell, shown
from spbench.bench.jobs.shell_words import ShellError
from spbench.bench.yaml_files import parse_yaml

_PROGRAMS = re.compile(r"(pretrain|train|finetune)_\w+\.py")
_TRAINS = {"pretrain_gpt.py": False, "pretrain_bert.py": True}
#: of a functional test
_ARGUMENTS, _VARIABLES = "MODEL_ARGS", "ENV_VARS"

#: variables of the environment that change nothing that is counted, by pattern, and why
_IDLE_VARIABLES = {
    r"NCCL_.*|TORCH_NCCL_.*|UCX_.*|GLOO_.*": "how collectives run, whose rates are the cluster's",
    r"CUDA_DEVICE_MAX_CONNECTIONS": "the order in which kernels start",
    r"NVTE_(FWD|BWD)_LAYERNORM_SM_MARGIN|NVTE_NORM_(FWD|BWD)_USE_CUDNN": "which kernel of norms runs",
    r"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "which algorithm an attention kernel has, which keeps the same",
    r"NVTE_(FLASH|FUSED|UNFUSED)_ATTN": "as TransformerEngine chooses anyway",
    r"PYTORCH_(CUDA_)?ALLOC_CONF": "how torch reserves memory, not what is allocated",
    r"OMP_.*|MKL_.*|PYTHON.*|TOKENIZERS_.*|HF_.*|WANDB_.*|LOGLEVEL|TORCHINDUCTOR_.*|TRITON_.*": "the host",
    r"MASTER_(ADDR|PORT)|(LOCAL_|NODE_)?RANK|LOCAL_WORLD_SIZE|CUDA_VISIBLE_DEVICES": "where processes are",
    CONTAINER: "what the job needs of it is the same in all releases",
    r"WORLD_SIZE": "how many processes there are",
}
#: variables that settings come from
_MAPPED_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG",)
#: variables of libraries, of which one that is not above may have an effect
_OF_LIBRARIES = re.compile(r"(NVTE|CUBLAS|CUDNN|CUDA|TORCH|PYTORCH|MEGATRON|TE)_.*")


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
    arguments = [*t.arguments(model_name(bert)), *_variables(t)]
    t.problems[:0] = given.problems
    return t.job("megatron", program(), files, arguments, problems)


def _variables(t: Translation) -> Iterator[Argument]:
    """What became of the variables of the environment."""
    for name, value in t.environment.items():
        if name in t.made_of:
            yield Argument(name, shown(value), "mapped", "; ".join(t.made_of[name]))
            continue
        if name in _MAPPED_VARIABLES:
            yield Argument(name, shown(value), "mapped", "not before the arguments are right")
            continue
        reason = next((why for pattern, why in _IDLE_VARIABLES.items() if re.fullmatch(pattern, name)), None)
        if reason is None and _OF_LIBRARIES.fullmatch(name):
            yield Argument(name, shown(value), "unknown", " in the environment")
        else:
            yield Argument(name, shown(value), "no effect", reason or "a variable of the script's own")


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
