"""Jobs of programs that train by Megatron-Core, from the section ``megatron`` of a program's table.

The section's lines ``keys`` are arguments of Megatron-LM, with underscores, and the keys of the program that
say their values; under ``sections``, prefixes, the program's own keys have the names of such arguments;
``defaults`` are the program's defaults other than Megatron-LM's. ``model`` is the line of the model's name;
and ``gpus`` are lines whose values multiplied are the number of GPUs.

Such keys are Megatron-LM's arguments with underscores: for example ``sequence_parallel: true`` for
``--sequence-parallel``, and ``add_bias_linear: false`` for ``--disable-bias-linear``.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.account import Account, Given, scalar_of
from spbench.bench.tools.jobs.adapter_settings import Adapted, NamedModel, named_model, set_adapters
from spbench.bench.tools.jobs.argument_tables import argument_table, may_move, shown, table_content
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.megatron import given_argument, make_settings, megatron_account
from spbench.bench.tools.jobs.rules import Said, said_of
from spbench.bench.tools.jobs.step_lines import FUNCTIONS, named_modules
from spbench.bench.tools.jobs.variables import variables


def job_by_megatron(kind: str, files: JobFiles, account: Account) -> Job:
    """The job of kind ``kind``, whose keys are in ``account``: Megatron-LM's arguments and the program's."""
    content, table = account.table.content["megatron"], account.table
    program, problems = table.program.split(" ")[0], list[str]()
    values = {name: given.value for name, given in account.given.items()}
    own = replace(account, given={n: g for n, g in account.given.items() if n in table.arguments})
    has_sizes = "num_layers" in values or "model" not in content
    fields = {} if has_sizes else _fields(own, content["model"], problems)
    known = {**content["defaults"], **_sizes(fields)}
    sources: dict[str, str] = {}
    for key, line in content.get("keys", {}).items():
        said = said_of(own, line, FUNCTIONS)
        if said.value is not None:
            known[key] = said.value
            sources[key] = ", ".join(map(own.spelled, said.names))
            own.took(f"{key}: {said.value}", *said.names)
    named = {n: _argument_of(n, content) for n in values if n not in table.arguments}
    of_job = {named[name]: values[name] for name in named}
    known_there = argument_table("megatron").arguments
    given = {name.lstrip("-"): scalar_of(text) for name, text in files.environment.items()}
    of_job |= {n: each for n, each in given.items() if f"--{n.replace('_', '-')}" in known_there}
    known |= of_job
    sources |= {key: f"{key}: {value}" for key, value in of_job.items()}
    if known.get("recompute_granularity") == "none":
        known["recompute_granularity"] = None
    said_gpus = [said_of(own, line, FUNCTIONS) for line in content.get("gpus", [])]
    counts = [int(each.value) for each in said_gpus if str(each.value).isdecimal()]
    own.took("how many GPUs there are", *(name for each in said_gpus for name in each.names))
    in_files = math.prod(counts) if counts and len(counts) == len(said_gpus) else account.facts.get("gpus")
    gpus = files.gpus or in_files
    if known.get("seq_length") is None:
        problems.append("how long sequences are is not said; --given seq_length=N")
    known.setdefault("max_position_embeddings", known.get("seq_length"))
    megatron = megatron_account(
        dict(as_arguments(known, sources, problems, program)), dict(account.environment)
    )
    if not problems and not own.problems:
        make_settings(megatron, gpus, files.cluster)
        if fields.get("model_type", "llama") not in table_content("swift_megatron")["families"]:
            _build_by_name(megatron, own, content["model"], {*of_job})
    megatron.ignore(
        "how many processes there are", *table.content.get("launch", {}).get("processes", "").split()
    )
    _set_adapters(own, content, fields)
    own.table = replace(table, content={**table.content, "trains": "megatron"})
    own.problems[:0] = problems
    return job_of_both(kind, files, gpus, values, megatron, own, named)


def _argument_of(name: str, content: Mapping[str, Any]) -> str:
    """Megatron-LM's argument, with underscores, that a key sets: the key without its section's prefix."""
    sections = content.get("sections", "").split()
    prefix = next((each for each in sections if name.startswith(each)), "")
    bare = name.removeprefix(prefix)
    return str(content.get("names", {}).get(bare, bare)) if prefix or not sections else name


def _set_adapters(own: Account, content: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Set a job's adapters, by the lines ``lora`` (their rank), ``targets`` and ``whole`` (keys)."""
    lora = said_of(own, content["lora"], FUNCTIONS) if "lora" in content else Said(0)
    keys = [content[each] for each in ("targets", "whole") if each in content]
    adapted = Adapted(*(named_modules(own, name) for name in keys))
    set_adapters(own, Said(lora.value or 0, lora.names), fields, adapted, separate=False, experts="each")


def _build_by_name(megatron: Account, own: Account, line: str, of_job: Collection[str]) -> None:
    """Replace the settings of a GPTModel by the model that the line ``model`` names, of a family that the
    table of ms-swift lacks; options in the table's ``kept`` stay. ``of_job``: arguments of the job's own."""
    name, key = own.chosen(*line.split())
    kept = {f"model_options.{each}" for each in table_content("swift_megatron")["kept"].split()}
    sizes = [s for s in megatron.settings if s.path.startswith("model_options.") and s.path not in kept]
    megatron.settings = [s for s in megatron.settings if s.path != "model" and s not in sizes]
    own.set("model", _named(name).model, *own.given_of(key))
    lost = [s.path.partition(".")[2] for s in sizes if s.source.partition(":")[0] in of_job]
    own.remarks += [f"options that the model has of its own, not the job's: {', '.join(lost)}"] * bool(lost)
    own.problems += ["mtp_num_layers: predicted tokens of this family: not modelled"] * ("mtp_layers" in lost)
    because = may_move("memory and time", "built as transformers has it, and laid out as Megatron-Core does")
    own.approximate(f"Megatron-Core's build of this family: {because}", key)
    own.strictly.setdefault(key, "Megatron-Core's build of this family")


def _named(name: Any) -> NamedModel:
    """The model of a converted model's name, which may have an ending such as ``-mcore``."""
    return named_model(str(name).rstrip("/").removesuffix("-mcore").removesuffix("_torch_dist"))


def _fields(own: Account, line: str, problems: list[str]) -> Mapping[str, Any]:
    """The fields of the model's config.json; empty, and a problem, if the model is not known."""
    name, key = own.chosen(*line.split())
    first = line.split()[0]
    advice = own.table.content["megatron"].get("advice", f"--given {first}=NAME, as on Hugging Face")
    if not name:
        problems.append(f"which model it is is not said; {advice}")
        return {}
    try:
        named = _named(name)
    except UserError as error:
        problems.append(f"{key}: {error}; or {advice}")
        return {}
    named.account(own, key)
    own.took("the model's sizes", first)
    own.took("the model's weights", *own.given_of(*line.split()[1:]))
    return named.fields


def _sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-LM by key that follow from a config.json's ``fields``."""
    content = table_content("swift_megatron")
    families: Mapping[str, Mapping[str, Any]] = content["families"]
    family = fields.get("model_type")
    if family is None:
        return {}
    sizes = {key: fields[field] for field, key in content["sizes"].items() if fields.get(field) is not None}
    experts = (
        {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"} if "num_experts" in sizes else {}
    )
    if each := fields.get("n_shared_experts"):
        sizes["moe_shared_expert_intermediate_size"] = each * fields["moe_intermediate_size"]
    if (dense := fields.get("first_k_dense_replace")) and experts:
        sizes["moe_layer_freq"] = f"([0]*{dense}+[1]*{fields['num_hidden_layers'] - dense})"
    if (fields.get("n_group") or 1) > 1:
        sizes |= {"moe_router_num_groups": fields["n_group"], "moe_router_group_topk": fields["topk_group"]}
    if "kv_lora_rank" in fields:
        sizes.pop("num_query_groups", None)
    if fields.get("use_qk_norm"):
        sizes["qk_layernorm"] = True
    groups = {"group_query_attention": True} if "num_query_groups" in sizes else {}
    tied = {"untie_embeddings_and_output_weights": not fields.get("tie_word_embeddings", False)}
    return {**families.get(family, {}), **sizes, **experts, **groups, **tied}


def as_key(argument: str) -> str:
    """An argument of Megatron-LM as the key that :func:`as_arguments` takes, without dashes."""
    return argument.removeprefix("--").replace("-", "_")


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
        return next(_switches(word, _OFF), ""), []
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
        if argument is not None and key in of_program and key not in named and name not in megatron.given:
            argument = of_program[key]
        if argument is not None:
            yield replace(argument, name=key, value=f"= {shown(value)}")
        elif any(_switches(word.replace("_", "-"), ("", *_OFF))):
            yield Argument(key, f"= {shown(value)}", "no effect", "is so without it")
        else:
            yield Argument(key, f"= {shown(value)}", "unknown", "")


def _switches(word: str, prefixes: Sequence[str]) -> Iterator[str]:
    """Megatron-LM's switches of a key's name ``word``, with dashes, behind one of ``prefixes``."""
    stems = [word.removeprefix(prefix) for prefix in _LEFT_OUT if word.startswith(prefix)]
    every = (f"--{prefix}{stem}" for stem in stems for prefix in prefixes)
    return (each for each in every if each in argument_table("megatron").arguments)
