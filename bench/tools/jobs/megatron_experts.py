"""Experts, latent attention and multi-token prediction of a Megatron-LM job, from the arguments; and
what gpt-oss's layers have: windows of attention, a sink in its softmax, and a clamped gate.
"""

from __future__ import annotations

import ast
import re

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_kernels import runs_before

_EXPERTS, _LATENT, _PREDICTED = "--num-experts", "--multi-latent-attention", "--mtp-num-layers"
_AUX, _AUX_WEIGHT = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
AUX_LOSSES = {"aux_loss": "batch", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
_GROUPS, _GROUP_TOPK = "--moe-router-num-groups", "--moe-router-group-topk"
_SCORE, _PRE_SOFTMAX = "--moe-router-score-function", "--moe-router-pre-softmax"
_CAPACITY, _PADDED = "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity"
_OVERLAPS = ("--overlap-moe-expert-parallel-comm", "--overlap-dispatch-backward-with-experts-wgrad")
_LATENT_SCALES = "--rotary-scaling-factor", "--mscale", "--mscale-all-dim"
_LATENT_SIZES = ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
#: the release beside which Megatron-LM's --deterministic-mode sums a token's rows by an index_add (unpermute
#: of its moe_utils.py, since 56818f9e of October 2025)
ADDED_BY_INDEX = (25, 9)
#: sizes of a layer's experts by the ranks of a stage
EXPERT_RANKS, EXPERT_PARTS = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
#: arguments that a job without experts may have
_OF_EXPERTS = re.compile(r"--(moe|expert)-")
#: a pattern of layers: digits, lists of them, sums and repetitions
_PATTERN = re.compile(r"[\d\s()\[\],+*]+")
_MOST_LAYERS = 10_000


def has_experts(a: Account) -> bool:
    """Whether the job's model has experts."""
    return bool(a.value(_EXPERTS))


def set_experts(a: Account, layers: int | None) -> None:
    """Set the experts of the model, if it has any.

    Args:
        layers: of the model; None: not known.
    """
    if not has_experts(a):
        names = [
            n for n, each in a.program_arguments.items() if each.outcome == "mapped" and _OF_EXPERTS.match(n)
        ]
        if (a.value(EXPERT_RANKS) or 1) > 1:
            a.problems.append(f"{a.spelled(EXPERT_RANKS)}: the model has no experts")
        a.ignore("of a mixture of experts (MoE), which the job has not", *names, *_OVERLAPS)
        return
    a.map(_EXPERTS, "--moe-router-topk")
    if (width := a.value("--moe-ffn-hidden-size")) is not None:
        a.set("model_options.expert_inner", width, "--moe-ffn-hidden-size")
    if a.value(shared := "--moe-shared-expert-intermediate-size"):
        a.map(shared)
        a.map_given("--moe-shared-expert-gate", "--moe-shared-expert-overlap")
    a.ignore("there are no shared experts", "--moe-shared-expert-gate", "--moe-shared-expert-overlap")
    _set_layers(a, layers)
    _set_router(a)
    _set_balance(a)
    _set_dispatch(a)
    if not a.has("--disable-bias-linear"):
        a.set("model_options.expert_biases", True, "--disable-bias-linear")


def _set_layers(a: Account, layers: int | None) -> None:
    """Set which layers have experts: each N-th, or as a list of 0 and 1 says."""
    name = "--moe-layer-freq"
    text = str(a.value(name)).strip()
    if text.isdecimal() and int(text) > 0:
        if (each := int(text)) > 1:
            a.set("model_options.expert_pattern", [1, *[0] * (each - 1)], name)
        a.ignore("all layers have experts", name)
        return
    pattern = pattern_in(text)
    if not pattern or not {*pattern} <= {0, 1} or (layers is not None and len(pattern) != layers):
        a.problems.append(f"{a.spelled(name)} is neither a number nor a list of 0 and 1 for {layers} layers")
        return
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if all(pattern[dense:]):
        a.set("model_options.dense_layers", dense, name)
    else:
        a.set("model_options.expert_pattern", pattern, name)


def pattern_in(text: str) -> list[int]:
    """The list that an expression such as ([0]*1+[1]*15)*2 is; empty where it is none."""
    if not _PATTERN.fullmatch(text):
        return []
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return value if isinstance(value, list) else []


def _evaluated(node: ast.expr) -> list[int] | int:
    """The value of a list, a number, a sum of lists, or a list times a number; ValueError for another."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        numbers = [_evaluated(each) for each in node.elts]
        return [number for number in numbers if isinstance(number, int)]
    if not isinstance(node, ast.BinOp):
        raise ValueError("no list")
    left, right = _evaluated(node.left), _evaluated(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
        listed, times = (left, right) if isinstance(left, list) else (right, left)
        assert isinstance(listed, list)
        assert isinstance(times, int)
        if len(listed) * times <= _MOST_LAYERS:
            return listed * times
    raise ValueError("no list")


def _set_router(a: Account) -> None:
    kinds, score = _balancing(a), a.value(_SCORE)
    chosen = a.value("--moe-router-topk") or 1
    sinkhorn = "sinkhorn" in kinds
    if score == "sqrtsoftplus":
        a.refuse_given("a router whose scores are the root of a softplus", _SCORE)
    if sinkhorn:
        a.set("model_options.router", "sinkhorn", _AUX)
        # the weights of a sinkhorn choice are a softmax, or for one expert a sigmoid, of the logits
        a.ignore("sinkhorn chooses by its own scores", _SCORE, _PRE_SOFTMAX)
    else:
        a.set("model_options.router", score, _SCORE)
        before = score == "sigmoid" or a.has(_PRE_SOFTMAX)
        a.set("model_options.router_scores", "all" if before else "chosen", _PRE_SOFTMAX, _SCORE)
        if score == "sigmoid" and chosen > 1:
            a.set("model_options.router_normalized", True, _SCORE, note="of several experts")
    if (scale := a.value("--moe-router-topk-scaling-factor")) is not None:
        a.set("model_options.router_scale", scale, "--moe-router-topk-scaling-factor")
    if a.value(_GROUPS):
        a.map(_GROUPS, _GROUP_TOPK)
    a.ignore("there are no groups", _GROUPS, _GROUP_TOPK)
    a.map_given("--moe-router-enable-expert-bias")
    a.ignore("the bias has no gradient", "--moe-router-bias-update-rate")
    dtype = a.value("--moe-router-dtype")
    if dtype == "fp64":
        a.refuse_given("a router in float64", "--moe-router-dtype")
    a.set("model_options.router_dtype", "float32" if dtype == "fp32" else "model", "--moe-router-dtype")
    if a.has(forced := "--moe-router-force-load-balancing"):
        a.set("model_options.routing", "even", forced)
    a.leave("time", "the router is fewer kernels", "--moe-router-fusion")


def _balancing(a: Account) -> list[str]:
    return str(a.value(_AUX) or "none").split()


def _set_balance(a: Account) -> None:
    kinds, weights = _balancing(a), str(a.value(_AUX_WEIGHT) or "0").split()
    if len(kinds) > 1:
        a.refuse_given("several losses that balance experts", _AUX)
        return
    (kind,), weight = kinds, float(weights[0])
    if kind == "quantile_balancing":
        a.refuse_given("balancing by quantiles", _AUX)
    elif kind in AUX_LOSSES and weight:
        a.set("model_options.aux_loss", AUX_LOSSES[kind], _AUX)
        a.set("model_options.aux_weight", weight, _AUX_WEIGHT)
    a.ignore("without a weight there is no such loss", _AUX)
    a.ignore("there is no loss that balances experts", _AUX_WEIGHT)
    if a.value(z := "--moe-z-loss-coeff"):
        a.map(z)
    a.ignore("no weight, no loss", z)


def _set_dispatch(a: Account) -> None:
    kind, names = a.value("--moe-token-dispatcher-type"), ["--moe-token-dispatcher-type"]
    dispatcher = {"allgather": "all_gather", "alltoall": "all_to_all", "flex": "node_deduplicated"}[kind]
    if kind == "flex" and a.value("--moe-flex-dispatcher-backend") == "hybridep":
        dispatcher = "hybrid_ep"
    if kind == "flex":
        names += ["--moe-flex-dispatcher-backend", "--moe-enable-deepep"]
        a.remarks.append("the flex dispatcher's own buffers, outside torch's allocator, are not counted")
    a.set("model_options.dispatcher", dispatcher, *names)
    a.ignore("of the flex dispatcher", "--moe-flex-dispatcher-backend", "--moe-enable-deepep")
    a.set(
        "model_options.experts_matmul",
        "grouped" if a.has("--moe-grouped-gemm") else "sequential",
        "--moe-grouped-gemm",
    )
    _set_permutation(a)
    if a.value(_CAPACITY) is not None:
        a.map(_CAPACITY)
        a.map_given(_PADDED)
        if a.value("--moe-token-drop-policy") == "position":
            a.approximate(
                "tokens are dropped by their probability, not by position", "--moe-token-drop-policy"
            )
    a.ignore("no token is dropped", _PADDED, "--moe-token-drop-policy")
    if a.has("--moe-apply-probs-on-input"):
        a.set("model_options.expert_weighting", "input", "--moe-apply-probs-on-input")
    beside = "dispatch and combine run beside other micro-batches, or gradients of experts' weights"
    a.leave("time", beside, *_OVERLAPS)


def _set_permutation(a: Account) -> None:
    names = ["--moe-permute-fusion"]
    deterministic = a.has("--deterministic-mode") and not runs_before(a, ADDED_BY_INDEX)
    if deterministic and not a.has(*names):
        names.append("--deterministic-mode")
    way = "fused" if a.has("--moe-permute-fusion") else "deterministic" if deterministic else "plain"
    a.set("model_options.permutation", way, *names)


def expert_sizes(a: Account, tensor: int, gpus: int | None, stages: int) -> None:
    """Set over how many ranks of a stage experts are spread, and each of them split."""
    if not has_experts(a):
        return
    ranks, parts = a.value(EXPERT_RANKS) or 1, a.value(EXPERT_PARTS) or tensor
    if gpus is not None and gpus % (ranks * parts * stages):
        a.problems.append(
            f"{gpus} GPUs are no multiple of expert x expert tensor x pipeline parallel sizes, which are "
            f"{ranks * parts * stages}"
        )
        return
    if ranks > 1:
        a.set("sizes.ep", ranks, EXPERT_RANKS)
    if parts > 1:
        note = "" if a.has(EXPERT_PARTS) else "as the tensor parallel size"
        a.set("sizes.etp", parts, EXPERT_PARTS, note=note)
    a.ignore("one part: not split", EXPERT_RANKS, EXPERT_PARTS)


def set_latent_attention(a: Account) -> bool:
    """Set latent attention, if the model has it; returns whether it has."""
    if not a.has(_LATENT):
        a.ignore("of latent attention, which the job has not", *_LATENT_SIZES, *_LATENT_SCALES)
        return False
    a.took("attention from latents, whose sizes are below", _LATENT)
    a.map("--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
    if a.value("--q-lora-rank") is not None:
        a.map("--q-lora-rank")
    if not a.has("--qk-layernorm"):
        a.refuse_given("latents without norms (no --qk-layernorm): not modelled", _LATENT)
    a.took("latents are normalised", "--qk-layernorm")
    a.ignore("the values of angles and scales alone", *_LATENT_SCALES)
    a.ignore("latent attention has head sizes of its own", "--kv-channels", "--rotary-percent")
    return True


def set_predicted_tokens(a: Account) -> None:
    """Set multi-token prediction, if the model has it."""
    if a.value(_PREDICTED):
        a.map(_PREDICTED, "--mtp-loss-scaling-factor")
    a.ignore("no token beyond the next is predicted", _PREDICTED, "--mtp-loss-scaling-factor")


_WINDOW, _EACH = "--window-size", "--window-attn-skip-freq"
_SINK, _GATE = "--softmax-type", "--quick-geglu"
#: what gpt-oss adds to the second factor of its gate, and where it clamps both
_OFFSET, _CLAMP = ("--glu-linear-offset", 1.0), ("--activation-func-clamp-value", 7.0)


def windows_of(a: Account, layers: int | None) -> str:
    """The pattern of layers in a window (W) and without one (S); "" where all layers are alike."""
    if not a.has(_WINDOW) or not a.has(_EACH):
        return ""
    text = str(a.value(_EACH)).strip()
    if text.isdecimal() and 0 < int(text) <= (layers or 1):
        return "W" * (int(text) - 1) + "S"
    listed = pattern_in(text)
    if not listed or len(listed) != layers:
        a.problems.append(f"{a.spelled(_EACH)} is neither a number of layers nor a list for {layers} layers")
    return "".join("W" if each else "S" for each in listed)


def set_windows(a: Account, pattern: str) -> None:
    """Set the window of attention, and which layers have it."""
    text = str(a.value(_WINDOW) or "").strip("() ")
    sides = re.fullmatch(r"(\d{1,9})[, ]+0", text)
    a.ignore(f"there is no {_WINDOW}", _EACH)
    if not a.has(_WINDOW):
        return
    if sides is None:
        a.refuse_given("a window that is not N,0 (N positions before each): not modelled", _WINDOW)
        return
    if pattern and "W" not in pattern:
        a.ignore("no layer has a window", _WINDOW, _EACH)
        return
    a.set("model_options.window", int(sides[1]) + 1, _WINDOW, note="with the position itself")
    if pattern:
        a.set("model_options.pattern", pattern, _EACH, note="W: a layer in the window")
        if not a.has("--group-query-attention"):
            a.set("model_options.kv_heads", a.value("--num-attention-heads"), "--num-attention-heads")


def set_sink(a: Account) -> None:
    """Set whether the softmax of attention has a learned sink."""
    kind = a.value(_SINK)
    if kind == "learnable":
        a.set("model_options.sinks", True, _SINK)
    elif kind != "vanilla":
        a.refuse_given("a softmax with a sink that is not learned: not modelled", _SINK)


def set_gate(a: Account) -> None:
    """Set gpt-oss's gate as the activation of the MLP."""
    values = {name: a.value(name) for name, _ in (_OFFSET, _CLAMP)}
    if values == dict((_OFFSET, _CLAMP)):
        a.set("model_options.mlp", "clamped_swiglu", _GATE, *values)
        a.leave("time and memory", "the gate is counted operator by operator, in one kernel there", _GATE)
        return
    a.refuse_given(
        f"a quick GELU that is not gpt-oss's ({_OFFSET[0]} 1.0, {_CLAMP[0]} 7.0): not modelled", _GATE
    )
    a.took("see the gate", *values)
