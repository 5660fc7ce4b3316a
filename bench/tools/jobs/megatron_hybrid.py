"""Hybrids of a Megatron-LM job: which of its layers mix tokens by Mamba-2 and which by attention;
and Muon, which does not go with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from spbench.bench.tools.jobs.account import Account

_PATTERN, _OLD, _SWITCH = "--hybrid-layer-pattern", "--hybrid-override-pattern", "--is-hybrid-model"
SPECIFICATION = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
#: of triton.testing.do_bench (get_empty_cache_for_benchmark), before the first call of mamba_ssm's kernels
_AUTOTUNING = "model_options.autotune_states_kib"
_HEADS, _HEAD_SIZE = "--mamba-num-heads", "--mamba-head-dim"
_SIZES = {"--mamba-num-groups": "state_key_heads", "--mamba-state-dim": "key_size", _HEAD_SIZE: "value_size"}
#: by letter of Megatron-Core: what mixes the tokens, as a pattern here has it
_MIXERS = {"M": "M", "*": "S"}
#: a layer here: one that mixes tokens, and the MLP (-) or the experts (E) behind it
_LAYER = re.compile(r"[M*][-E]?")


def pattern_of(a: Account) -> str:
    """The job's pattern of layers; "" where it is no hybrid."""
    return str(a.value(_PATTERN) or a.value(_OLD) or "")


def layers_of_stages(a: Account) -> list[int]:
    """Layers, as a model here counts them, of each part of the pattern between bars."""
    return [len(_LAYER.findall(part)) for part in pattern_of(a).split("|")]


def set_hybrid(a: Account) -> bool:
    """Set the layers of a hybrid; returns whether the job is one."""
    pattern = pattern_of(a)
    if not pattern:
        if a.has(_SWITCH):
            a.problems.append(f"{_SWITCH} needs {_PATTERN}")
            a.took("see what is wrong", _SWITCH)
        a.ignore("of a hybrid, which the job is not", *_SIZES, _HEADS)
        return False
    name = _PATTERN if a.has(_PATTERN) else _OLD
    a.took("as the pattern says", _SWITCH, "--spec")
    parts = pattern.split("|")
    if a.has(_PATTERN) and a.has(_OLD):
        a.problems.append(f"{_PATTERN} and {_OLD} are both given; leave one")
    if others := set(pattern) - {*"M*-E|"}:
        a.refuse_given(f"layers {' '.join(sorted(others))} of a hybrid: not modelled", name)
    elif not all(re.fullmatch(f"({_LAYER.pattern})*", part) for part in parts):
        a.refuse_given("an MLP (-) or experts (E) behind no layer that mixes tokens: not modelled", name)
    elif not {*"-E"} & {*pattern}:
        a.refuse_given("layers without an MLP alone: not modelled", name)
    letters = len(pattern) - pattern.count("|")
    if a.value("--num-layers") not in (None, letters):
        a.refuse_given(f"not the {letters} layers of {name}", "--num-layers")
    a.ignore(f"as many as {name} has", "--num-layers")
    ours = "".join(_MIXERS.get(letter, letter) for letter in pattern if letter != "|")
    a.set("model_options.pattern", ours, name)
    _set_states(a)
    return True


def _set_states(a: Account) -> None:
    heads, hidden, size = a.value(_HEADS), a.value("--hidden-size") or 0, a.value(_HEAD_SIZE)
    note = "" if heads else f"2 x --hidden-size / {_HEAD_SIZE}"
    a.set("model_options.state_heads", heads or 2 * hidden // max(1, size), _HEADS, note=note)
    for argument, option in _SIZES.items():
        a.set(f"model_options.{option}", a.value(argument), argument)
    if not a.has("--group-query-attention"):
        a.set("model_options.kv_heads", a.value("--num-attention-heads"), "--num-attention-heads")
    if "M" in pattern_of(a) and not a.has("--deterministic-mode"):  # which leaves one version of each
        a.set(_AUTOTUNING, 2**18, note="256 MiB, of Triton's autotuner in the first step")
    if a.has("--normalization") and a.value("--normalization") == "LayerNorm":
        a.took("the norms of Mamba's outputs are RMS norms", "--normalization")


def stages_of(a: Account, stages: int) -> Sequence[int]:
    """Layers of each run of layers of a hybrid's pipeline; empty, with a problem, where the bars of its
    pattern do not say them."""
    sizes = layers_of_stages(a)
    if len(sizes) % stages:
        a.problems.append(
            f"a hybrid's pattern of {len(sizes)} parts is for no --pipeline-model-parallel-size {stages}; "
            "set | between the stages"
        )
        return []
    return sizes


_STEPS, _PARTS, _LAYOUT = "--muon-num-ns-steps", "--muon-tp-mode", "--no-use-layer-wise-param-layout"
_WHOLE, _NESTEROV, _HALVES = "--muon-no-split-qkv", "--muon-nesterov", "--muon-use-syrk"
_PRECISION, _OTHERS = "--muon-fp32-matmul-prec", "--muon-scalar-optimizer"
_SHARDS = "--use-distributed-optimizer"


def set_muon(a: Account) -> bool:
    """Set the optimizer's update; returns whether it is Muon's."""
    kind = a.value("--optimizer")
    if kind not in ("muon", "dist_muon"):
        if kind != "adam":
            a.refuse_given("another optimizer than Adam and Muon", "--optimizer")
        a.ignore("Adam is what there is by default", "--optimizer")
        names = _STEPS, _PARTS, _LAYOUT, _WHOLE, _NESTEROV, _HALVES, _PRECISION, _OTHERS
        a.ignore("of Muon, which the job has not", *names)
        return False
    if pattern_of(a):
        a.refuse_given("Muon for a hybrid, whose projections of Mamba it leaves out", "--optimizer")
    a.set("training.update", "muon", "--optimizer")
    if a.value(_PARTS) == "distributed":
        a.refuse_given("Newton-Schulz steps whose matmuls are spread over tensor parallel ranks", _PARTS)
    elif a.has(_PARTS):
        a.map(_PARTS)
    a.map_given(_STEPS)
    if kind == "dist_muon" and not a.has(_SHARDS):
        a.set("training.distributed_optimizer", True, "--optimizer")
    if kind == "dist_muon" or a.has(_SHARDS):
        a.map_given(_LAYOUT)
    a.ignore(f"of {_SHARDS}", _LAYOUT)
    if a.value(_OTHERS) != "adam":
        a.refuse_given("another optimizer than Adam beside Muon", _OTHERS)
    a.ignore("Adam is what there is beside Muon", _OTHERS)
    a.took("a weight is orthogonalised whole", _WHOLE)
    if not a.has(_WHOLE):
        a.remarks.append("Muon takes queries', keys' and values' rows of one weight together, not apart")
    a.leave("memory", "one more tensor of a matrix at a time", _NESTEROV)
    a.leave("time", "matmuls of symmetric matrices are halved", _HALVES)
    if a.value(_PRECISION) != "medium":
        a.leave("time", "Newton-Schulz steps are not in bfloat16", _PRECISION)
    a.ignore("Newton-Schulz steps are in bfloat16", _PRECISION)
    return True
