"""The model of a Megatron-LM job (a GPTModel, BertModel or HybridModel), from the job's arguments; and the
settings that depend on the card and on the release of NVIDIA's container: above all, the kernel that
TransformerEngine takes for attention."""

import re
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.measure import Device, engines_choice, generation_of, load_cluster
from spbench.bench.tools.jobs import megatron_layers
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.rules import call
from spbench.bench.units import gib
from spbench.impls import published_model

#: the variable that NVIDIA's container of PyTorch sets to its own release, such as "24.01"
CONTAINER = "NVIDIA_PYTORCH_VERSION"
#: the first release with TransformerEngine 1.3, which takes FlashAttention 2 (2.4.1 or newer) also if
#: algorithms must be deterministic (DotProductAttention in pytorch/attention.py at v1.2 and at v1.3)
_DETERMINISTIC_FLASH_ATTENTION = 2402


def _release_of(account: Account) -> int | None:
    """The release of the job's container, as year and month: 2401; None if the job does not say it."""
    parts = re.fullmatch(r"(\d\d)\.(\d\d)", account.environment.get(CONTAINER, ""))
    return int(parts[1] + parts[2]) if parts else None


def container_problems(account: Account) -> list[str]:
    """The problem with the release that the job gives for its container; empty if the release is right."""
    if CONTAINER not in account.environment or _release_of(account) is not None:
        return []
    return [f"{account.spelled(CONTAINER)} is no release of NVIDIA's container, such as 25.09"]


def facts_of_card(account: Account, cluster: str | None) -> dict[str, Any]:
    """The facts about card and container for rules: the ``release``, the card's name, its ``generation`` (0:
    not known), its ``processors``, and its L2 cache in KiB."""
    device = _device(cluster)
    facts: dict[str, Any] = {"release": _release_of(account), "cluster": cluster, "card": "", "generation": 0}
    if device is not None:
        cache = device.l2_cache_bytes.value
        facts |= {"card": device.name, "generation": generation_of(device)}
        facts |= {"cache_kib": cache and cache // 2**10, "processors": device.multiprocessors.value}
    return facts


def _device(cluster: str | None) -> Device | None:
    try:
        return load_cluster(cluster).device if cluster is not None else None
    except UserError:
        return None  # raised again with the cell


def choose_attention(account: Account) -> None:
    """Set the attention kernel that TransformerEngine chooses if the job allows several
    (:func:`engines_choice`, and nvte_get_fused_attn_backend)."""
    generation, release = account.facts["generation"], account.facts["release"]
    fixed = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    off = {name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if account.environment.get(name) == "0"}
    deterministic = account.has("--deterministic-mode") or account.environment.get(fixed) == "0"
    dropout = account.value("--attention-dropout") > 0
    fused = "NVTE_FUSED_ATTN" not in off and not (generation >= 10 and deterministic and dropout)
    undetermined = deterministic and release is not None and release < _DETERMINISTIC_FLASH_ATTENTION
    flash = "NVTE_FLASH_ATTN" not in off and not undetermined
    kernel = engines_choice(generation, fused=fused, flash=flash)
    names = ["--attention-backend", *sorted(off)]
    names += [fixed] if deterministic and (generation >= 10 or undetermined) else []
    names += [CONTAINER] if undetermined else []
    note = f"TransformerEngine's choice on {account.facts['card'] or 'this card'}"
    account.set("model_options.attention", kernel, *names, note=note)


def check_switches(account: Account) -> None:
    """Compare each of TransformerEngine's variables that allow a kernel with --attention-backend, and give
    the variable its outcome by the rules ``switch_of_attention``."""
    asked = account.value("--attention-backend") or "auto"
    for name, kernel in account.table.content["allowing"].items():
        if (value := account.environment.get(name)) is not None:
            as_asked = value == str(int(asked in (kernel, "auto")))
            account.facts |= {"variable": name, "asked": asked, "as_asked": as_asked}
            account.facts["setting"] = f"{name}={value}"
            call(account, "switch_of_attention")


def ignore_absent_fusions(account: Account) -> None:
    """Ignore switches that turn off a fusion which the model has not. Sets the facts ``left_out``, the other
    switches that turn off a fusion, and ``unfused``, the names of those fusions."""
    call(account, "absence_of_fusions")
    fusions = account.given_of(*account.table.content["fusions"])
    left_out = [name for name in fusions if name not in account.idle]
    stems = [name.removeprefix("--no-").removesuffix("-fusion").replace("-", "_") for name in left_out]
    account.facts |= {"left_out": left_out, "unfused": stems}


#: by preset, the number of weights in its layers; a job's model is named by the closest preset
_HYBRID = "nemotron-h-8b"
_PRESETS = {"gpt3-345m": 3e8, "gpt3-7b": 6.4e9, "gpt3-175b": 1.7e11}
#: names of arguments that configure experts
_OF_EXPERTS = re.compile(r"--(moe|expert)-")
#: bytes of a mask from which on a remark names it; bytes of the host for each of its bytes, while it is made
_LARGE_MASK, _MADE_BYTES = 2**30, 8


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
    pairs = (megatron_layers.length_of(account) or 0) ** 2
    held = (account.value("--micro-batch-size") or 1) * pairs
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
        "mask_gib": gib(held) if held >= _LARGE_MASK else "",
        "made_gib": gib(_MADE_BYTES * pairs),
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
