"""Jobs of Megatron-Bridge: its configuration in YAML, and a model's config.json where that has no sizes.

Every key says what an argument of Megatron-LM says, and is translated as that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.tools.jobs.deepspeed_files import content_of
from spbench.bench.tools.jobs.job import Argument, Job, Outcome
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.keys import Key, Keys, flat, known_keys, shown
from spbench.bench.tools.jobs.megatron_arguments import known_arguments, parse
from spbench.bench.tools.jobs.megatron_model import model_name, set_model
from spbench.bench.tools.jobs.megatron_stages import set_schedule
from spbench.bench.tools.jobs.megatron_training import set_batch, set_optimizer, set_parallelism
from spbench.bench.tools.jobs.megatron_translation import Translation
from spbench.bench.tools.jobs.variables import variables
from spbench.bench.yaml_files import read_yaml

#: of which a configuration has some, and that no other kind has
_SECTIONS = {"train", "ddp", "scheduler", "mixed_precision", "rng", "comm_overlap"}
#: of mixed_precision
_PRECISIONS = {"bf16_mixed": "--bf16", "bf16-mixed": "--bf16", "fp16_mixed": "--fp16", "16-mixed": "--fp16"}
_SILU = {"silu", "torch.nn.functional.silu", "torch.nn.functional.swish"}
_GELU = {"gelu", "torch.nn.functional.gelu"}
#: what Megatron-Bridge sets for models of a config.json, by its fields; and by its family
_SIZES = {
    "num_hidden_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "intermediate_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_key_value_heads": "model.num_query_groups",
    "head_dim": "model.kv_channels",
    "vocab_size": "model.vocab_size",
    "rms_norm_eps": "model.layernorm_epsilon",
    "rope_theta": "model.rotary_base",
    "tie_word_embeddings": "model.share_embeddings_and_output_weights",
}
_LLAMA = {
    "model.normalization": "RMSNorm",
    "model.gated_linear_unit": True,
    "model.activation_func": "silu",
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.share_embeddings_and_output_weights": False,
}
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA | {"model.add_qkv_bias": True},
    "qwen3": _LLAMA | {"model.qk_layernorm": True},
}


@cache
def _tables() -> tuple[str, Mapping[str, Key], Mapping[str, str], Mapping[str, str]]:
    """The program, its keys, and the arguments of Megatron-LM that they are, or are where they are false."""
    content = read_yaml(Path(__file__).with_name("bridge_keys.yaml"))
    known = known_keys(content) | _as_megatron(content["as_megatron"])
    return str(content["program"]), known, content["arguments"], content["switched_off_by"]


def _as_megatron(words: str) -> dict[str, Key]:
    """Keys of which becomes what becomes of Megatron-LM's argument of their name."""
    found = known_keys({"mapped": words, "no_effect": (), "not_modelled": (), "refused": ()})
    for name, key in found.items():
        word = name.rpartition(".")[2].replace("_", "-")
        argument = next(a for p in ("", "no-", "disable-") if (a := known_arguments().get(f"--{p}{word}")))
        outcome, detail = argument.outcome, argument.detail
        if argument.beside:  # without effect where none of the others is given, which are refused
            outcome, detail = "no effect", f"of {detail}, whose own key is refused"
        found[name] = replace(key, outcome=outcome, detail=detail)
    return found


def key_of(argument: str) -> tuple[str | None, bool]:
    """The key that says what an argument of Megatron-LM does, None where there is none, and whether a switch
    is its true value."""
    _, _, arguments, off = _tables()
    by_argument = {**{other: key for key, other in off.items()}, **{a: key for key, a in arguments.items()}}
    return by_argument.get(argument), argument not in off.values()


@dataclass
class BridgeTranslation(Translation):
    """As :class:`Translation`, which names the keys that the arguments came from."""

    spellings: dict[str, str] = field(default_factory=dict)

    def spelled(self, name: str) -> str:
        return self.spellings.get(name, super().spelled(name))


def read(files: JobFiles) -> Job | None:
    """A job of Megatron-Bridge; None where no file is a configuration of its.

    Raises:
        UserError: a file is damaged.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for file in files.files:
        content = content_of(file) or {}
        if "model_type" in content:
            found["config"] = content
        elif isinstance(content.get("model", {}), dict) and len(_SECTIONS & {*content}) >= 2:
            found["bridge"] = content
        else:
            return None
    if "bridge" not in found or len(found) != len(files.files):
        return None
    return _job(found["bridge"], found.get("config"), files)


def _job(content: Mapping[str, Any], config: Mapping[str, Any] | None, files: JobFiles) -> Job:
    program, known, _, _ = _tables()
    given = {name: value for name, value in flat(content, known) if not name.endswith("_target_")}
    k = Keys(program, known, given)
    values = {name: key.default for name, key in known.items() if key.outcome == "mapped"}
    of_config = _of_config(k, config)
    values |= of_config | {name: k.value(name) for name in given if name in values}
    t = _translation(k, values, of_config)
    problems = files.machine_problems(None)
    if not k.problems and not t.given.problems:
        set_model(t, bert=False, cluster=files.cluster)
        replicas = set_parallelism(t, files.gpus)
        set_batch(t, replicas)
        set_schedule(t)
        set_optimizer(t, files.cluster)
    t.problems[:0] = [*k.problems, *t.given.problems]
    # of Megatron-LM's own script, whose refusal Megatron-Bridge has not
    t.remarks = [remark for remark in t.remarks if "this one refuses" not in remark]
    arguments = [*_arguments(k, t), *variables(t, t.environment)]
    return t.job("bridge", program, files, arguments, problems)


def _of_config(k: Keys, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """What follows from a config.json."""
    if config is None:
        return {}
    family = config["model_type"]
    if family not in _FAMILIES:
        k.problems.append(f"config.json: model_type {shown(family)} is none of {', '.join(_FAMILIES)}")
        return {}
    return {**_FAMILIES[family], **{key: config[f] for f, key in _SIZES.items() if config.get(f) is not None}}


def _translation(k: Keys, values: Mapping[str, Any], of_config: Mapping[str, Any]) -> BridgeTranslation:
    """The keys as arguments of Megatron-LM."""
    _, known, arguments, off = _tables()
    words: list[str] = []
    spellings = {}

    def add(argument: str, key: str, *value: object) -> None:
        whole = (int(v) if isinstance(v, float) and v.is_integer() and v > 1 else v for v in value)
        words.extend([argument, *map(str, whole)])
        default = f"config.json ({key})" if key in of_config else f"default of {key}"
        spellings[argument] = k.spelled(key) if key in k.given else default

    values = _with_overlaps(k, values)
    for key, argument in arguments.items():
        value = values[key]
        if key in k.given and value == known[key].default and value in (None, False):
            k.ignore("is so by default", key)
        if key == "model.vocab_size" and values["model.should_pad_vocab"]:
            argument = "--vocab-size"
        if value is True:
            add(argument, key)
        elif value is not None and value is not False:
            add(argument, key, *(value if isinstance(value, list) else [value]))
    for key, argument in off.items():
        if values[key] is False:
            add(argument, key)
    if values["model.num_query_groups"] is not None:
        add("--group-query-attention", "model.num_query_groups")
    _add_activation(k, values, add)
    _add_precision(k, values["mixed_precision"], add)
    lengths = {
        values[key] for key in ("model.seq_length", "dataset.seq_length", "dataset.sequence_length")
    } - {None}
    if len(lengths) > 1:
        k.problems.append("model.seq_length and dataset.seq_length differ; give one length")
    elif lengths and values["model.seq_length"] is None:
        add("--seq-length", "dataset.seq_length", *lengths)
    if values["model.max_position_embeddings"] is None and lengths:
        add("--max-position-embeddings", "model.max_position_embeddings", min(lengths))
    return BridgeTranslation(parse(words), _environment(k), problems=[], spellings=spellings)


def _with_overlaps(k: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a section comm_overlap leaves, which sets overlaps of several replicas' gradients and
    weights, and of interleaved stages (setup of CommOverlapConfig in its training/comm_overlap.py)."""
    own = {name for name in k.given if name.startswith("comm_overlap.")}
    if not own:
        return dict(values)
    if k.value("comm_overlap.tp_comm_overlap") and values["model.tensor_model_parallel_size"] > 1:
        k.refuse("messages of tensor parallelism that are hidden in products", "comm_overlap.tp_comm_overlap")
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
        if k.value(chosen) is not None:
            set_there[key] = k.value(chosen)
        k.took(f"{key}: {shown(set_there[key])}", chosen)
        k.took(f"comm_overlap has {shown(set_there[key])}", key)
    k.took("overlaps of gradients and weights", "comm_overlap.tp_comm_overlap")
    return {**values, **set_there}


def _environment(k: Keys) -> dict[str, str]:
    """The variables that Megatron-Bridge sets before it starts."""
    found: dict[str, str] = {}
    for key in ("env_vars", "model.env_vars"):
        found |= {str(name): str(value) for name, value in (k.value(key) or {}).items()}
        k.took("variables of the environment", key)
    return found


def _add_activation(k: Keys, values: Mapping[str, Any], add: Any) -> None:
    gate, function = "model.gated_linear_unit", "model.activation_func"
    named = values[function]
    named = named.get("_target_") if isinstance(named, Mapping) else named
    gated = bool(values[gate])
    if gated and named in _SILU:
        add("--swiglu", gate)
        if not values["model.bias_activation_fusion"] and "model.bias_activation_fusion" in k.given:
            add("--no-bias-swiglu-fusion", "model.bias_activation_fusion")
    elif gated or (named is not None and named not in _GELU):
        k.refuse("an MLP of another activation than GELU, or SiLU with a gate", function, gate)
    k.took(f"mlp: {'swiglu' if gated else 'gelu'}", gate, function, "model.bias_activation_fusion")


def _add_precision(k: Keys, recipe: Any, add: Any) -> None:
    key = "mixed_precision"
    if recipe in _PRECISIONS:
        add(_PRECISIONS[recipe], key)
    elif recipe is not None:
        k.refuse("this recipe of precision", key)
    k.took(f"precision: {_PRECISIONS.get(recipe, '--fp32')[2:]}", key)


def _arguments(k: Keys, t: BridgeTranslation) -> Iterator[Argument]:
    """What became of every key, by what became of its argument."""
    _, _, arguments, off = _tables()
    told = {argument.name: argument for argument in t.arguments(model_name(False))}
    for own in k.arguments():
        name = arguments.get(own.name) or off.get(own.name, "")
        name = "--vocab-size" if name == "--padded-vocab-size" and name not in told else name
        argument = told.get(name)
        if argument is None or own.outcome == "unknown" or own.name in k.missing or k.problems:
            yield own if own.outcome != "refused" or own.name in k.missing else _idle(k, own)
            continue
        yield Argument(own.name, own.value, argument.outcome, argument.detail)


def _idle(k: Keys, own: Argument) -> Argument:
    """A key that stands for no argument, as it says what is so without one."""
    outcome: Outcome = "refused" if k.known[own.name].outcome == "refused" else "no effect"
    return Argument(own.name, own.value, outcome, own.detail if outcome == "refused" else "is so without it")
