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

#: words of tokenizers that need no file to be known: GPT-2's, and BERT's two
_WORDS = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
#: words of TikTokenizer's vocabulary, unless --vocab-size says otherwise
_TIKTOKEN_WORDS = 2**17
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
    a.facts |= {**_facts(a), **facts_of_card(a, cluster)}
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
    _set_sizes(a, bert)
    _set_vocabulary(a, bert)
    call(a, "library")
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


def model_name(bert: bool) -> str:
    """Megatron-Core's name of the model."""
    return "BertModel" if bert else "GPTModel"


def _preset(a: Account) -> str:
    weights = 12 * (layers_of(a) or 1) * (a.value("--hidden-size") or 1) ** 2
    return min(_PRESETS, key=lambda name: max(weights / _PRESETS[name], _PRESETS[name] / max(1, weights)))


def _set_sizes(a: Account, bert: bool) -> None:
    layers, hidden = layers_of(a), a.value("--hidden-size")
    heads, inner = a.value("--num-attention-heads"), a.value("--ffn-hidden-size")
    if layers is None:
        a.problems.append("--num-layers is missing")
    patterns = "--hybrid-layer-pattern", "--hybrid-override-pattern"
    names = patterns if pattern_of(a) else ("--num-layers", "--encoder-num-layers")
    a.set("model_options.layers", layers, *names)
    a.map("--hidden-size", "--num-attention-heads")
    if hidden is None or heads is None:
        return
    note = ""
    if inner is None:
        swiglu = a.has("--swiglu")
        inner = int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden
        note = "8/3 of --hidden-size, in 64s" if swiglu else "4 x --hidden-size"
    if not bert:
        a.set("model_options.inner", inner, "--ffn-hidden-size", note=note)
    elif inner == 4 * hidden:
        a.ignore("is so by default", "--ffn-hidden-size")
    call(a, "latents")
    if a.has("--multi-latent-attention"):
        return
    size = a.value("--kv-channels")
    if heads < 1 or (size is None and hidden % heads):
        a.problems.append(f"--num-attention-heads {heads} does not divide --hidden-size {hidden}")
    elif size is not None and size * heads != hidden:
        a.map("--kv-channels")
    else:
        a.ignore("is so by default", "--kv-channels")


def _set_vocabulary(a: Account, bert: bool) -> None:
    multiple = "--make-vocab-size-divisible-by"
    a.ignore("the number of its words comes from elsewhere", "--tokenizer-model")
    padded, words = a.value("--padded-vocab-size"), a.value("--vocab-size")
    kind = a.value("--tokenizer-type") or ("BertWordPieceLowerCase" if bert else "GPT2BPETokenizer")
    if padded is not None:
        a.set("model_options.vocabulary", padded, "--padded-vocab-size")
        a.set("model_options.vocabulary_multiple", 1, "--padded-vocab-size", note="padded already")
        a.ignore("--padded-vocab-size says all", "--vocab-size", "--tokenizer-type", multiple)
        return
    if words is not None:
        a.set("model_options.vocabulary", words, "--vocab-size", "--tokenizer-type")
        if kind == "NullTokenizer":
            a.remarks.append("older versions add a word to the --vocab-size of a NullTokenizer")
    elif kind in _WORDS:
        a.set("model_options.vocabulary", _WORDS[kind], "--tokenizer-type", note=f"words of {kind}")
        if bert:
            a.remarks.append(
                f"the words of --vocab-file are taken for {kind}'s {_WORDS[kind]}; --vocab-size says others"
            )
    elif published := published_model(str(a.value("--tokenizer-model") or "")):
        names = "--tokenizer-type", "--tokenizer-model"
        a.set("model_options.vocabulary", published.config["vocab_size"], *names, note="of its config.json")
    elif kind == "TikTokenizer":
        a.set("model_options.vocabulary", _TIKTOKEN_WORDS, "--tokenizer-type")
    else:
        a.ignore("the number of its words is missing", "--tokenizer-type")
        a.problems.append(f"how many words the {kind} has is not said; --given vocab-size=N")
    a.map(multiple)
