"""Jobs of Primus by Megatron-LM or torchtitan: its YAML, and a model's YAML where that is unknown. An
experiment for torchtitan has torchtitan's keys and some keys of Primus's own.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from spbench.bench.errors import suggestion
from spbench.bench.tools.jobs.account import Account, key_account, scalar_of
from spbench.bench.tools.jobs.adapter_settings import Adapted, set_adapters
from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table, shown, table_content
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles, mapping_in
from spbench.bench.tools.jobs.megatron import make_settings, megatron_account
from spbench.bench.tools.jobs.megatron_inside import as_arguments, job_of_both
from spbench.bench.tools.jobs.rules import Said
from spbench.bench.tools.jobs.torchtitan import job_around
from spbench.bench.yaml_files import merge

#: ${NAME:VALUE}
_VARIABLE = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")
#: the default rank of Primus's adapters
_RANK = 32
#: an experiment's modules that train a model: the first from random weights, the second tunes a given model
_TRAINERS = ("pre_trainer", "post_trainer")
#: keys of sizes by which a model's file is recognized
_SIGNS = ("num_layers", "hidden_size")


def read(files: JobFiles) -> Job | None:
    """A job of Primus; None if no file is an experiment of Primus. UserError if a file is damaged."""
    trainer: Mapping[str, Any] | None = None
    tunes = False
    sizes: dict[str, Any] = {}
    for file in files.files:
        content = mapping_in(file) or {}
        modules = content.get("modules")
        trainers = [modules.get(name) for name in _TRAINERS] if isinstance(modules, dict) else []
        if any(isinstance(each, dict) for each in trainers):
            trainer = next(each for each in trainers if isinstance(each, dict))
            tunes = trainer is trainers[1]
        elif any(sign in content for sign in (*_SIGNS, "extends")):
            sizes = {
                **{k: v for k, v in content.items() if k not in ("extends", "bases", "includes")},
                **sizes,
            }
        else:
            return None
    return None if trainer is None else _job(trainer, sizes, files, tunes=tunes)


def _job(trainer: Mapping[str, Any], sizes: Mapping[str, Any], files: JobFiles, *, tunes: bool) -> Job:
    table = argument_table("primus")
    overrides = trainer.get("overrides") or {}
    problems: list[str] = []
    values = {
        str(name): _resolved(value, files.environment, problems, str(name))
        for name, value in (overrides.items() if isinstance(overrides, dict) else ())
    }
    framework = trainer.get("framework", "megatron")
    model = _resolved(trainer.get("model", ""), files.environment, problems, "model")
    if framework == "torchtitan":
        return torchtitan_job(str(model), values, files, problems)
    if framework != "megatron":
        problems.append(f"modules.pre_trainer.framework: {shown(trainer['framework'])} is not megatron")
    of_model = _model_of(model, sizes, problems)
    tuning = table.content["tuning"] if tunes else {}
    known = {**table.content["defaults"], **tuning, **of_model, **values}
    # the model's keys that are no arguments of Megatron-LM get an outcome like keys of the job
    values = {**{n: v for n, v in of_model.items() if n in table.arguments}, **values}
    own = key_account(table, [(n, _typed(table, n, v)) for n, v in values.items() if n in table.arguments])
    if known.get("use_turbo_deepep"):
        known |= {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    sources = {name: f"{name}: {shown(value)}" for name, value in values.items()}
    given = dict(as_arguments(known, sources, problems, "Primus"))
    megatron = megatron_account(given, dict(files.environment))
    if not problems:
        make_settings(megatron, files.gpus, files.cluster)
    _set_own_switches(own, known)
    own.problems[:0] = problems
    return job_of_both("primus", files, None, values, megatron, own)


def _typed(table: ArgumentTable, name: str, value: Any) -> Any:
    """A value in the type of its key: 0 and 1 become false and true for a key that takes a bool."""
    return bool(value) if table.arguments[name].takes == "bool" and value in (0, 1) else value


def _resolved(value: Any, environment: Mapping[str, str], problems: list[str], name: str) -> Any:
    """A value in which the environment's values or the DEFAULT replace each ``${NAME:DEFAULT}``."""
    if isinstance(value, dict):
        return {n: _resolved(v, environment, problems, f"{name}.{n}") for n, v in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value

    def text(match: re.Match[str]) -> str:
        replacement = environment.get(match[1], match[2])
        if replacement is None:
            problems.append(f"{name}: ${match[1]} is not set; --given {match[1]}=VALUE")
        return replacement or ""

    return scalar_of(_VARIABLE.sub(text, value))


def _model_of(model: Any, sizes: Mapping[str, Any], problems: list[str]) -> Mapping[str, Any]:
    """The arguments of a model by key: those of the model's file (``sizes``), else those of a model that
    Primus brings along; empty, and a problem, if there is no such model."""
    if sizes:
        return sizes
    name, content = PurePosixPath(str(model)).name.removesuffix(".yaml"), table_content("primus_models")
    known: Mapping[str, Mapping[str, Any]] = content["models"]
    for start, layers in content["other_layers"].items():
        if name.startswith(start):
            problems.append(f"model {shown(model)}: {layers}: not modelled")
            return {}
    if name not in known:
        near = suggestion(name, [*known])
        problems.append(
            f"model {shown(model)} is none of Primus's own{near}; give its YAML, and those it extends, beside"
        )
    return known.get(name, {})


def _set_own_switches(own: Account, known: Mapping[str, Any]) -> None:
    """Add the outcomes of Primus's switches and the settings of its adapters to ``own``, from all values."""
    if own.value("use_turbo_deepep"):
        own.took("--moe-token-dispatcher-type flex: DeepEP", "use_turbo_deepep")
    lora = own.value("lora")
    rank = lora.get("dim", _RANK) if isinstance(lora, dict) and lora.get("enabled") else 0
    fields = {"num_experts": known.get("num_experts")}
    targets = Said(lora.get("target_modules") if rank else None, own.given_of("lora"))
    lora_rank = Said(rank, own.given_of("lora"))
    set_adapters(own, lora_rank, fields, Adapted(targets), separate=False, experts="shared")
    own.ignore("it is off", "use_turbo_deepep")


_EIGHT_BITS, _CONVERTERS = "-fp8", ["quantize.linear.float8"]


def torchtitan_job(model: str, overrides: Mapping[str, Any], files: JobFiles, problems: list[str]) -> Job:
    """The job of an experiment whose framework is torchtitan.

    Args:
        model: the path of the model's file.
        overrides: the experiment's keys, without variables in their values.
        problems: problems with the variables, to which this function adds its own.
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
    sections = merge(merge(sections, table.content["defaults"]), overrides)
    job = job_around("primus", table, sections, files)
    return replace(job, problems=[*problems, *job.problems])
