"""The model of a Megatron-LM job: a GPTModel, BertModel or HybridModel, from the job's arguments."""

from __future__ import annotations

import re
from typing import Any

from spbench.bench.tools.jobs import megatron_layers
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_kernels import (
    check_switches,
    choose_attention,
    facts_of_card,
    ignore_absent_fusions,
)
from spbench.bench.tools.jobs.rules import call
from spbench.bench.units import gib
from spbench.impls import published_model

#: by preset, the number of weights in its layers; a job's model is named by the closest preset
_HYBRID = "nemotron-h-8b"
_PRESETS = {"gpt3-345m": 3e8, "gpt3-7b": 6.4e9, "gpt3-175b": 1.7e11}
#: names of arguments that configure experts
_OF_EXPERTS = re.compile(r"--(moe|expert)-")
#: bytes of the data loader's mask, one for each query and key, from which on a remark names the mask
_LARGE_MASK = 2**30


def set_model(account: Account, *, bert: bool, cluster: str | None) -> None:
    """Set the model and its options from the job's arguments."""
    account.calls = {
        "layers_with_experts": megatron_layers.set_layers_with_experts,
        "absent_fusions": ignore_absent_fusions,
        "choose_attention": choose_attention,
        "switches_of_attention": check_switches,
        "first_steps": lambda account: account.first_steps(one=account.value("--train-iters") == 1),
    }
    account.facts |= {**_facts(account), **_facts_of_sizes(account, bert), **facts_of_card(account, cluster)}
    hybrid = not bert and megatron_layers.set_hybrid(account)
    windows = (
        "" if hybrid or bert else megatron_layers.windows_of(account, megatron_layers.layers_of(account))
    )
    preset = "bert-large" if bert else _HYBRID if hybrid or windows else _preset(account)
    name = "HybridModel" if hybrid else model_name(bert)
    account.set("model", preset, note=f"{name}, all of whose sizes are below")
    needed = ("--hidden-size", "--num-attention-heads", "--max-position-embeddings", "--micro-batch-size")
    account.problems += [f"{name} is missing" for name in needed if not account.has(name)]
    if not bert:
        call(account, "experts")
        call(account, "predicted_tokens")
    for section in ("sizes", "vocabulary", "library"):
        call(account, section)
    if bert:
        call(account, "bert")
        return
    account.ignore("of a BertModel", "--bert-no-binary-head")
    call(account, "layers")
    call(account, "positions")
    megatron_layers.set_windows(account, windows)
    for section in ("sink", "attention", "state_processors", "loss", "recomputation"):
        call(account, section)


def _facts(account: Account) -> dict[str, Any]:
    """The facts for conditions of rules that need several arguments at once, by name."""
    activations = [name for name in ("--swiglu", "--squared-relu", "--quick-geglu") if account.has(name)]
    granularity = (
        "selective" if account.has("--recompute-activations") else account.value("--recompute-granularity")
    )
    modules = (account.value("--recompute-modules") or "core_attn").split()
    if granularity is None and account.has("--moe-layer-recompute"):
        granularity, modules = "selective", ["moe"]
    balances = str(account.value("--moe-router-load-balancing-type") or "none").split()
    weights = str(account.value("--moe-aux-loss-coeff") or "0").split()
    heads, size = account.value("--mamba-num-heads"), account.value("--mamba-head-dim")
    positions = account.value("--position-embedding-type")
    micro = account.value("--micro-batch-size") or 1
    held = micro * (megatron_layers.length_of(account) or 0) ** 2
    return {
        "pattern": megatron_layers.pattern_of(account),
        "layers": megatron_layers.layers_of(account),
        "length": megatron_layers.length_of(account),
        "local": "local" in (account.value("--spec"), account.value("--transformer-impl")),
        "rotary": account.has("--use-rotary-position-embeddings") or positions == "rope",
        "rotary_base": float(account.value("--rotary-base")),
        "activations": activations,
        "several_activations": " and ".join(activations) if len(activations) > 1 else "",
        "mlp": activations[0].removeprefix("--").replace("-", "_") if activations else "gelu",
        "granularity": granularity,
        "modules": modules,
        "of_experts": [
            name
            for name, each in account.program_arguments.items()
            if each.outcome == "mapped" and _OF_EXPERTS.match(name)
        ],
        "several_balances": len(balances) > 1,
        "aux_weight": float(weights[0]),
        "state_heads": heads or 2 * (account.value("--hidden-size") or 0) // max(1, size),
        "state_heads_note": "" if heads else "2 x --hidden-size / --mamba-head-dim",
        # ranks of context parallelism have parts of the heads, not of a sequence, within attention
        "whole_sequences": {*str(account.value("--cp-comm-type") or "p2p").split()} == {"a2a"},
        "micro_batch": micro,
        "mask_gib": gib(held) if held >= _LARGE_MASK else "",
    }


def _facts_of_sizes(account: Account, bert: bool) -> dict[str, Any]:
    """The facts for rules on the widths of layers and on the vocabulary, by name."""
    hidden, heads = account.value("--hidden-size") or 0, account.value("--num-attention-heads") or 0
    inner, head_size = account.value("--ffn-hidden-size"), account.value("--kv-channels")
    usual, note = 4 * hidden, "4 x --hidden-size"
    if account.has("--swiglu"):
        usual, note = int(4 * hidden * 2 / 3) // 64 * 64, "8/3 of --hidden-size, in 64s"
    tokenizer = account.value("--tokenizer-type") or (
        "BertWordPieceLowerCase" if bert else "GPT2BPETokenizer"
    )
    published = published_model(str(account.value("--tokenizer-model") or ""))
    return {
        "bert": bert,
        "inner": usual if inner is None else inner,
        "inner_note": note if inner is None else "",
        "four_times": (usual if inner is None else inner) == 4 * hidden,
        "uneven_heads": heads < 1 or (head_size is None and hidden % heads > 0),
        "own_head_size": head_size is not None and head_size * heads != hidden,
        "tokenizer": tokenizer,
        "words": account.table.content["tokenizers"].get(tokenizer),
        "published_words": published.config["vocab_size"] if published else None,
    }


def model_name(bert: bool) -> str:
    """Megatron-Core's name of the model."""
    return "BertModel" if bert else "GPTModel"


def _preset(account: Account) -> str:
    weights = 12 * (megatron_layers.layers_of(account) or 1) * (account.value("--hidden-size") or 1) ** 2
    return min(_PRESETS, key=lambda name: max(weights / _PRESETS[name], _PRESETS[name] / max(1, weights)))
