"""Jobs of Megatron-Bridge: its configuration in YAML, and a model's config.json where that has no sizes.

Every key is translated to the argument of Megatron-LM that means the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.adapter_settings import named_model
from spbench.bench.tools.jobs.argument_tables import (
    ArgumentTable,
    ProgramArgument,
    argument_table,
    arguments_of,
    flat,
    shown,
)
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles, mapping_in
from spbench.bench.tools.jobs.megatron import make_settings, megatron_account
from spbench.bench.tools.jobs.megatron_inside import as_arguments, as_key, job_of_both
from spbench.bench.tools.jobs.python_values import has_recipes, recipe_of

_LATENT = "model.multi_latent_attention"


@cache
def bridge_table() -> ArgumentTable:
    """The table of Megatron-Bridge's keys; its content has the argument of Megatron-LM for each key
    (``arguments``), and the argument for each key that is false (``switched_off_by``)."""
    table, of_megatron = argument_table("bridge"), argument_table("megatron").arguments
    alike = dict(_as_megatron(table.content["as_megatron"]))
    same = {key: _switch(key) for key, each in alike.items() if each.outcome == "mapped"}
    given = {key: argument for key, argument in same.items() if argument in of_megatron}
    content = {**table.content, "arguments": {**given, **table.content["arguments"]}}
    return replace(table, arguments={**table.arguments, **alike}, content=content)


def _switch(key: str) -> str:
    """The argument of Megatron-LM that has a key's name: ``--NAME`` for ``SECTION.NAME``."""
    return f"--{key.rpartition('.')[2].replace('_', '-')}"


def _as_megatron(words: str) -> Iterator[tuple[str, ProgramArgument]]:
    """Pairs of a key's name and the key, each with the outcome of Megatron-LM's argument of that name."""
    of_megatron = argument_table("megatron").arguments
    for key in arguments_of(words, "", "mapped"):
        word = _switch(key.name)[2:]
        argument = next(
            a for prefix in ("", "no-", "disable-") if (a := of_megatron.get(f"--{prefix}{word}"))
        )
        outcome, detail = argument.outcome, argument.detail
        if argument.beside:  # without effect unless the job gives one of these others, which are refused
            outcome, detail = "no effect", f"of {detail}, whose own key is refused"
        yield key.name, replace(key, outcome=outcome, detail=detail)


def key_of(argument: str) -> tuple[str | None, bool]:
    """The key that does what an argument of Megatron-LM does (None: no key does), and whether the key is
    true, not false, in a job with the argument."""
    content = bridge_table().content
    off = {other: key for key, other in content["switched_off_by"].items()}
    by_argument = {**off, **{other: key for key, other in content["arguments"].items()}}
    return by_argument.get(argument), argument not in off


def read(files: JobFiles) -> Job | None:
    """A job of Megatron-Bridge; None if no file is a configuration of Megatron-Bridge. UserError if a file is
    damaged."""
    contents: dict[str, Mapping[str, Any]] = {}
    unclear: list[str] = []
    # other kinds of job have at most one of these sections
    sections = bridge_table().content["signature"]["keys"]
    for file in files.files:
        if has_recipes(file):
            contents["bridge"], named, unclear = recipe_of(file)
            if named:
                known = named_model(named)
                contents.setdefault("config", known.fields)
                unclear = [*unclear, *filter(None, [known.taken])]
            continue
        content = mapping_in(file) or {}
        if "model_type" in content:
            contents["config"] = content
        elif isinstance(content.get("model", {}), dict) and len({*content}.intersection(sections)) >= 2:
            contents["bridge"] = content
        else:
            return None
    if "bridge" not in contents or len(contents) < len(files.files):
        return None
    job = _job(contents["bridge"], contents.get("config"), files)
    return replace(job, remarks=[*job.remarks, *unclear])


def _job(content: Mapping[str, Any], config: Mapping[str, Any] | None, files: JobFiles) -> Job:
    table = bridge_table()
    account = key_account(
        table,
        flat(content, table.arguments),
        lambda name: not name.endswith("_target_"),
        overrides=files.environment,
    )
    values = {name: key.default for name, key in table.arguments.items() if key.outcome == "mapped"}
    from_config = _from_config(account, config)
    values |= from_config | {name: account.value(name) for name in account.given if name in values}
    known, sources = _as_arguments(account, values, from_config)
    given = dict(as_arguments(known, sources, account.problems, "Megatron-Bridge"))
    megatron = megatron_account(given, _environment(account))
    if not account.problems:
        make_settings(megatron, files.gpus, files.cluster)
        asked = (name for name in account.given_of(*values) if not account.is_default(name))
        account.ignore("is so without it", *asked)
    # Megatron-LM's own script refuses these jobs, but Megatron-Bridge does not
    megatron.remarks = [remark for remark in megatron.remarks if "this one refuses" not in remark]
    of_both = table.content["switched_off_by"], table.content["arguments"]
    named = {key: as_key(argument) for each in of_both for key, argument in each.items()}
    named["model.vocab_size"] = "vocab_size" if "vocab_size" in known else "padded_vocab_size"
    of_job = {name: each.value for name, each in account.given.items()}
    return job_of_both("bridge", files, None, of_job, megatron, account, named)


def _from_config(account: Account, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of keys, by key, that follow from the fields of a config.json."""
    if config is None:
        return {}
    family = config["model_type"]
    content = bridge_table().content
    families: Mapping[str, Mapping[str, Any]] = content["families"]
    if family not in families:
        account.problems.append(f"config.json: model_type {shown(family)} is none of {', '.join(families)}")
        return {}
    sizes = {key: config[f] for f, key in content["sizes"].items() if config.get(f) is not None}
    return {**families[family], **sizes}


def _as_arguments(
    account: Account, values: Mapping[str, Any], from_config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of Megatron-LM's arguments that keys set, and the sources of these values, both by the
    argument with underscores; ``values``: all values by key."""
    content, of_megatron = bridge_table().content, argument_table("megatron").arguments
    alike = content["arguments"].keys() - argument_table("bridge").content["arguments"].keys()
    known, sources = dict[str, Any](), dict[str, str]()

    def add(argument: str, key: str, value: Any = True) -> None:
        word, one = as_key(argument), isinstance(value, list) and not of_megatron[argument].count
        known[word] = str(value) if one else content["dtypes"].get(str(value), value)
        default = f"config.json ({key})" if key in from_config else f"default of {key}"
        sources[word] = account.spelled(key) if key in account.given else default

    values = _with_overlaps(account, values)
    for key, argument in content["arguments"].items():
        value = values[key]
        unasked = key not in account.given and key not in from_config
        if unasked and (key in alike or (key in content["latent_sizes"] and not values[_LATENT])):
            continue
        is_default = value == account.program_arguments[key].default
        if key in account.given and is_default and value in (None, False):
            account.ignore("is so by default", key)
        if key == "model.vocab_size" and values["model.should_pad_vocab"]:
            argument = "--vocab-size"
        if value is not None and value is not False:
            add(argument, key, value)
    for key, argument in content["switched_off_by"].items():
        if values[key] is False:
            add(argument, key)
    if values["model.num_query_groups"] is not None:
        add("--group-query-attention", "model.num_query_groups")
    _add_activation(account, values, add)
    _add_precision(account, values["mixed_precision"], add)
    length, positions = "model.seq_length", "model.max_position_embeddings"
    lengths = {values[key] for key in (length, "dataset.seq_length", "dataset.sequence_length")} - {None}
    if len(lengths) > 1:
        account.problems.append("model.seq_length and dataset.seq_length differ; give one length")
    elif lengths and values[length] is None:
        add("--seq-length", "dataset.seq_length", min(lengths))
    if values[positions] is None and lengths:
        add("--max-position-embeddings", positions, min(lengths))
    return known, sources


def _with_overlaps(account: Account, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values after a section comm_overlap, which sets keys for overlaps of gradients, weights and
    interleaved stages (CommOverlapConfig's setup in Megatron-Bridge's training/comm_overlap.py)."""
    own = {name for name in account.given if name.startswith("comm_overlap.")}
    if not own:
        return dict(values)
    if account.value("comm_overlap.tp_comm_overlap") and values["model.tensor_model_parallel_size"] > 1:
        account.refuse(
            "messages of tensor parallelism that are hidden in matmuls", "comm_overlap.tp_comm_overlap"
        )
    chunks = values["model.virtual_pipeline_model_parallel_size"] or 1
    interleaved = values["model.pipeline_model_parallel_size"] > 1 and chunks > 1
    set_there = {
        "ddp.overlap_grad_reduce": True,
        "ddp.overlap_param_gather": True,
        "ddp.bucket_size": 128 * 2**20,
        "ddp.align_param_gather": interleaved,
        "model.overlap_p2p_comm": interleaved,
    }
    for key in set_there:
        chosen = f"comm_overlap.{key.partition('.')[2]}"
        if account.value(chosen) is not None:
            set_there[key] = account.value(chosen)
        account.took(f"{key}: {shown(set_there[key])}", chosen)
        account.took(f"comm_overlap has {shown(set_there[key])}", key)
    account.took("overlaps of gradients and weights", "comm_overlap.tp_comm_overlap")
    return {**values, **set_there}


def _environment(account: Account) -> dict[str, str]:
    """The variables of the environment, by name, that Megatron-Bridge sets before it starts."""
    environment: dict[str, str] = {}
    for key in ("env_vars", "model.env_vars"):
        environment |= {str(name): str(value) for name, value in (account.value(key) or {}).items()}
        account.took("variables of the environment", key)
    return environment


def _add_activation(account: Account, values: Mapping[str, Any], add: Callable[..., None]) -> None:
    gate, function = "model.gated_linear_unit", "model.activation_func"
    functions = bridge_table().content["functions"]
    named = values[function]
    named = named.get("_target_") if isinstance(named, Mapping) else named
    gated = bool(values[gate])
    if gated and named in functions["silu"]:
        add("--swiglu", gate)
        if not values["model.bias_activation_fusion"] and "model.bias_activation_fusion" in account.given:
            add("--no-bias-swiglu-fusion", "model.bias_activation_fusion")
    elif gated or (named is not None and named not in functions["gelu"]):
        account.refuse("an MLP of another activation than GELU, or SiLU with a gate", function, gate)
    account.took(f"mlp: {'swiglu' if gated else 'gelu'}", gate, function, "model.bias_activation_fusion")


def _add_precision(account: Account, recipe: Any, add: Callable[..., None]) -> None:
    key, recipes = "mixed_precision", bridge_table().content["precisions"]
    words = recipes.get(str(recipe).replace("-", "_"), "").split()
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--"):
            add(word, key, True if following.startswith("--") else following)
    if not words and recipe is not None:
        account.refuse("this recipe of precision", key)
    account.took(f"precision: {words[0][2:] if words else 'fp32'}", key)
