"""Jobs of Megatron-MoE-ModelZoo: a model's YAML of Megatron-LM's arguments, and the run script that gives its
variables, as sbatch_benchmarking.sh puts them together."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import yaml

from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles, mapping_in
from spbench.bench.tools.jobs.launch import shell_of
from spbench.bench.tools.jobs.megatron import read as read_megatron
from spbench.bench.tools.jobs.shell import Command
from spbench.bench.tools.jobs.shell_syntax import unknown_in

_ARGUMENTS, _BENCHMARK = "MODEL_ARGS", "sbatch_benchmarking.sh"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
#: the number of GPUs of a node
_PER_NODE = 8


def read(files: JobFiles) -> Job | None:
    """A job of the ModelZoo; None where the files are not a model's YAML and a script that runs it. UserError
    if a file is damaged, or the script runs several."""
    if len(files.files) != 2:
        return None
    model = next((file for file in files.files if _ARGUMENTS in (mapping_in(file) or {})), None)
    script = next((file for file in files.files if mapping_in(file) is None), None)
    if model is None or script is None or _BENCHMARK not in script.text:
        return None
    command = _command(script, files.environment)
    own = {**command.environment, **files.environment}
    environment = {**_defaults(own), **own}
    content = dict(mapping_in(model) or {})
    arguments = content[_ARGUMENTS]
    if not isinstance(arguments, dict):
        raise model.wrong(f"{_ARGUMENTS}: a mapping of names to values is needed")
    switches = {name: _switch(value, environment) for name, value in arguments.items()}
    further = dict(_further(command, environment, arguments))
    content[_ARGUMENTS] = {**switches, **further}
    whole = JobFile(model.path, yaml.safe_dump(content, sort_keys=False).encode())
    nodes = environment.get("NNODES", "")
    gpus = int(nodes) * _PER_NODE if nodes.isdecimal() and len(nodes) < 6 else None
    job = read_megatron(replace(files, files=[whole], gpus=files.gpus or gpus, environment=environment))
    return job and replace(job, kind="model_zoo", title=files.title)


@cache
def _models() -> Mapping[str, Mapping[str, str]]:
    """The default variables of each model of the zoo, by the model's name."""
    content = table_content("model_zoo")
    names = content["names"].split()
    return {
        model: dict(zip(names, values.split(), strict=False)) for model, values in content["models"].items()
    }


def _defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the benchmark sets for a model if the script does not; variables for unequal or for
    virtual stages become "false" if the job has no such stages."""
    values = dict(_models().get(environment.get("MODEL", ""), {}))
    numbers = {**values, **environment}
    layers, stages = (numbers.get(name, "") for name in ("NUM_LAYERS", "PP"))
    if not (layers.isdecimal() and stages.isdecimal() and int(stages)) or int(layers) % int(stages) == 0:
        values |= dict.fromkeys(("PP_FIRST", "PP_LAST"), "false")
    if numbers.get("VPP", "1") == "1":
        values["LAYERS_PER_VP"] = "false"
    return values


def _switch(value: object, environment: Mapping[str, str]) -> object:
    """True or False if a value is a variable ``$NAME`` that is "true" or "false"; else the value itself."""
    variable = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    return {"true": True, "false": False}.get(environment.get(variable[1], ""), value) if variable else value


def _command(script: JobFile, environment: Mapping[str, str]) -> Command:
    """The script's command that runs the benchmark, with all variables that the script exports. UserError if
    there is no such command, or if there are several."""
    shell = shell_of(script, environment)
    commands = [each for each in shell.commands if any(word.endswith(_BENCHMARK) for word in each.words)]
    if len(commands) != 1:
        raise script.wrong(f"{len(commands)} commands run {_BENCHMARK}; one is read")
    exported = {name: shell.variables.get(name, "") for name in shell.exported}
    plain = {name: value for name, value in exported.items() if isinstance(value, str)}
    return replace(commands[0], environment={**plain, **commands[0].environment})


def _further(
    command: Command, environment: Mapping[str, str], arguments: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Pairs of name and value of the arguments that the benchmark adds to a model's ``arguments``: for its
    variables, and from the words of its own command line."""
    added_by = table_content("model_zoo")["added"]
    yield from added_by["DISPATCHER"].get(environment.get("DISPATCHER", "deepep"), {}).items()
    for name, added in added_by["switches"].items():
        if environment.get(name) == "1":
            yield from added.items()
    precision = environment.get("PR", "bf16")
    yield from added_by["PR"].get(precision, {}).items()
    if environment.get("OPTIMIZER_OFFLOAD") != "1":
        yield from added_by["PR, on the device"].get(precision, {}).items()
    at = next(n for n, word in enumerate(command.words) if word.endswith(_BENCHMARK))
    name, values = "", list[str]()
    own: dict[str, object] = {}
    for word in [*command.words[at + 1 :], "--"]:
        if word.startswith("--"):
            if name:
                own[name] = values if len(values) > 1 else values[0] if values else True
            name, values = word, []
        elif not unknown_in(word):
            values.append(word)
    yield from own.items()
    stages = environment.get("VPP", "")
    virtual = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
    if environment.get("PP_FIRST", "false") != "false" and "--pipeline-model-parallel-layout" not in own:
        yield "--decoder-first-pipeline-num-layers", environment["PP_FIRST"]
        yield "--decoder-last-pipeline-num-layers", environment.get("PP_LAST", "false")
    if stages.isdecimal() and int(stages) > 1:
        if virtual[0] in arguments and "LAYERS_PER_VP" not in environment:
            yield virtual[0], None
        if "--pipeline-model-parallel-layout" not in own:
            yield virtual[1], stages
