"""The model of a Megatron-LM job: its GPTModel, BertModel or HybridModel, from the arguments."""

from __future__ import annotations

import re
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_kernels import (
    check_switches,
    choose_attention,
    facts_of_card,
    ignore_absent_fusions,
)
from spbench.bench.tools.jobs.megatron_layers import (
    layers_of,
    length_of,
    pattern_of,
    set_hybrid,
    set_layers_with_experts,
    set_windows,
    windows_of,
)
from spbench.bench.tools.jobs.rules import call
from spbench.bench.units import gib
from spbench.impls import published_model

#: presets by the weights of their layers; a job has the name of the one that it is closest to
_HYBRID = "nemotron-h-8b"
_PRESETS = {"gpt3-345m": 3e8, "gpt3-7b": 6.4e9, "gpt3-175b": 1.7e11}
#: arguments that a job without experts may have
_OF_EXPERTS = re.compile(r"--(moe|expert)-")
#: bytes of the data loader's mask, one for each query and key, from which on it is worth a word
_LARGE_MASK = 2**30


def set_model(a: Account, *, bert: bool, cluster: str | None) -> None:
    """Set the model and its options from the job's arguments."""
    a.calls = {
        "layers_with_experts": set_layers_with_experts,
        "absent_fusions": ignore_absent_fusions,
        "choose_attention": choose_attention,
        "switches_of_attention": check_switches,
        "first_steps": lambda a: a.first_steps(one=a.value("--train-iters") == 1),
    }
    a.facts |= {**_facts(a), **_facts_of_sizes(a, bert), **facts_of_card(a, cluster)}
    hybrid = not bert and set_hybrid(a)
    windows = "" if hybrid or bert else windows_of(a, layers_of(a))
    preset = "bert-large" if bert else _HYBRID if hybrid or windows else _preset(a)
    name = "HybridModel" if hybrid else model_name(bert)
    a.set("model", preset, note=f"{name}, all of whose sizes are below")
    needed = ("--hidden-size", "--num-attention-heads", "--max-position-embeddings", "--micro-batch-size")
    a.problems += [f"{name} is missing" for name in needed if not a.has(name)]
    if not bert:
        call(a, "experts")
        call(a, "predicted_tokens")
    for section in ("sizes", "vocabulary", "library"):
        call(a, section)
    if bert:
        call(a, "bert")
        return
    a.ignore("of a BertModel", "--bert-no-binary-head")
    call(a, "layers")
    call(a, "positions")
    set_windows(a, windows)
    for section in ("sink", "attention", "state_processors", "loss", "recomputation"):
        call(a, section)


def _facts(a: Account) -> dict[str, Any]:
    """What rules ask that no argument says alone."""
    activations = [name for name in ("--swiglu", "--squared-relu", "--quick-geglu") if a.has(name)]
    granularity = "selective" if a.has("--recompute-activations") else a.value("--recompute-granularity")
    modules = (a.value("--recompute-modules") or "core_attn").split()
    if granularity is None and a.has("--moe-layer-recompute"):
        granularity, modules = "selective", ["moe"]
    balances = str(a.value("--moe-router-load-balancing-type") or "none").split()
    weights = str(a.value("--moe-aux-loss-coeff") or "0").split()
    heads, size = a.value("--mamba-num-heads"), a.value("--mamba-head-dim")
    positions = a.value("--position-embedding-type")
    micro = a.value("--micro-batch-size") or 1
    held = micro * (length_of(a) or 0) ** 2
    return {
        "pattern": pattern_of(a),
        "layers": layers_of(a),
        "length": length_of(a),
        "local": "local" in (a.value("--spec"), a.value("--transformer-impl")),
        "rotary": a.has("--use-rotary-position-embeddings") or positions == "rope",
        "rotary_base": float(a.value("--rotary-base")),
        "activations": activations,
        "several_activations": " and ".join(activations) if len(activations) > 1 else "",
        "mlp": activations[0].removeprefix("--").replace("-", "_") if activations else "gelu",
        "granularity": granularity,
        "modules": modules,
        "of_experts": [
            name
            for name, each in a.program_arguments.items()
            if each.outcome == "mapped" and _OF_EXPERTS.match(name)
        ],
        "several_balances": len(balances) > 1,
        "aux_weight": float(weights[0]),
        "state_heads": heads or 2 * (a.value("--hidden-size") or 0) // max(1, size),
        "state_heads_note": "" if heads else "2 x --hidden-size / --mamba-head-dim",
        # ranks of context parallelism have parts of the heads, not of a sequence, within attention
        "whole_sequences": {*str(a.value("--cp-comm-type") or "p2p").split()} == {"a2a"},
        "micro_batch": micro,
        "mask_gib": gib(held) if held >= _LARGE_MASK else "",
    }


def _facts_of_sizes(a: Account, bert: bool) -> dict[str, Any]:
    """What rules ask of the widths of layers and of the vocabulary."""
    hidden, heads = a.value("--hidden-size") or 0, a.value("--num-attention-heads") or 0
    inner, head_size = a.value("--ffn-hidden-size"), a.value("--kv-channels")
    usual, note = 4 * hidden, "4 x --hidden-size"
    if a.has("--swiglu"):
        usual, note = int(4 * hidden * 2 / 3) // 64 * 64, "8/3 of --hidden-size, in 64s"
    tokenizer = a.value("--tokenizer-type") or ("BertWordPieceLowerCase" if bert else "GPT2BPETokenizer")
    published = published_model(str(a.value("--tokenizer-model") or ""))
    return {
        "bert": bert,
        "inner": usual if inner is None else inner,
        "inner_note": note if inner is None else "",
        "four_times": (usual if inner is None else inner) == 4 * hidden,
        "uneven_heads": heads < 1 or (head_size is None and hidden % heads > 0),
        "own_head_size": head_size is not None and head_size * heads != hidden,
        "tokenizer": tokenizer,
        "words": a.table.content["tokenizers"].get(tokenizer),
        "published_words": published.config["vocab_size"] if published else None,
    }


def model_name(bert: bool) -> str:
    """Megatron-Core's name of the model."""
    return "BertModel" if bert else "GPTModel"


def _preset(a: Account) -> str:
    weights = 12 * (layers_of(a) or 1) * (a.value("--hidden-size") or 1) ** 2
    return min(_PRESETS, key=lambda name: max(weights / _PRESETS[name], _PRESETS[name] / max(1, weights)))
