"""Attention and fused operators of a Megatron-LM job, from the arguments and the card."""

from __future__ import annotations

from spbench.bench.measure.clusters.attention_kernels import engines_choice
from spbench.bench.tools.jobs.megatron_container import (
    CONTAINER,
    DETERMINISTIC_FLASH_ATTENTION,
    card_of,
    runs_before,
)
from spbench.bench.tools.jobs.megatron_translation import Translation

#: switches that leave out a fusion
_FUSIONS = (
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-rope-fusion"),
)
#: variables of TransformerEngine that allow a kernel, and its --attention-backend
_ALLOWING = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}


def set_attention(t: Translation, local: bool, cluster: str | None) -> None:
    """Set heads, the kernel of attention, and the mask of the data loader."""
    g = t.given
    groups = g.number("--num-query-groups")
    if g.on("--group-query-attention"):
        t.set("model_options.kv_heads", groups, "--group-query-attention", "--num-query-groups")
    else:
        t.ignore("without --group-query-attention each head has its own", "--num-query-groups")
    if g.on("--qk-layernorm"):
        t.set("model_options.qk_norm", True, "--qk-layernorm")
    t.set("model_options.attention_dropout", g.share("--attention-dropout"), "--attention-dropout")
    asked, version = g.text("--attention-backend"), g.number("--flash-attention-version")
    names: tuple[str, ...] = ("--attention-backend",)
    if local:
        t.ignore("--transformer-impl local has unfused attention alone", *names, "--flash-attention-version")
        t.set("model_options.attention", "unfused", "--transformer-impl", "--spec", note="its only attention")
    elif asked in ("unfused", "fused"):
        t.set("model_options.attention", "cudnn" if asked == "fused" else asked, *names)
    elif asked == "local":
        t.refuse("the attention of --spec local without it", *names)
    elif asked == "flash":
        if version is None:
            t.set("model_options.attention", "flash", *names)
        else:
            t.set(
                "model_options.attention", f"flash_attention_{version}", *names, "--flash-attention-version"
            )
    elif cluster is None:
        t.ignore("TransformerEngine chooses by the card, which --cluster says", *names)
    else:
        _choose_attention(t, cluster)
    t.ignore("attention is not FlashAttention", "--flash-attention-version")
    _check_switches(t, local, asked or "auto")
    mask = "--no-create-attention-mask-in-dataloader"
    t.set("model_options.loader_mask", not g.on(mask), mask)
    _set_fusions(t, local)


def _choose_attention(t: Translation, cluster: str) -> None:
    """The kernel that TransformerEngine takes where it may (:func:`engines_choice`, and
    nvte_get_fused_attn_backend)."""
    card, generation = card_of(cluster)
    fixed = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    off = {name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if t.environment.get(name) == "0"}
    deterministic = t.given.on("--deterministic-mode") or t.environment.get(fixed) == "0"
    dropout = t.given.share("--attention-dropout") > 0
    fused = "NVTE_FUSED_ATTN" not in off and not (generation >= 10 and deterministic and dropout)
    undetermined = deterministic and runs_before(t, DETERMINISTIC_FLASH_ATTENTION)
    flash = "NVTE_FLASH_ATTN" not in off and not undetermined
    kernel = engines_choice(generation, fused=fused, flash=flash)
    names = ["--attention-backend", *sorted(off)]
    if deterministic and (generation >= 10 or undetermined):
        names.append(fixed)
    if undetermined:
        names.append(CONTAINER)
    t.set(
        "model_options.attention", kernel, *names, note=f"TransformerEngine's choice on {card or 'this card'}"
    )


def _check_switches(t: Translation, local: bool, asked: str) -> None:
    """Account for TransformerEngine's variables that allow kernels. Megatron-LM sets them by
    --attention-backend, and refuses to start where they are set otherwise (_set_attention_backend of its
    language_module.py); older versions took them as they were."""
    for name, kernel in _ALLOWING.items():
        value = t.environment.get(name)
        if value is None:
            continue
        if local:
            t.ignore("--transformer-impl local has unfused attention alone", name)
        elif value == str(int(asked in (kernel, "auto"))):
            t.ignore(f"is so with --attention-backend {asked}", name)
        elif asked == "auto":
            t.took("TransformerEngine's choice among the kernels that are left", name)
            t.remarks.append(f"{name}={value} beside --attention-backend auto runs in older versions alone")
        else:
            t.problems.append(f"{name}={value} and --attention-backend {asked} are both given; leave one")


def ignore_absent_fusions(t: Translation, local: bool) -> list[str]:
    """Say which fusions there are none of, that could be left out; returns those that are left out."""
    if not local:
        t.ignore("TransformerEngine's softmax is its own", "--no-masked-softmax-fusion")
    if any(map(t.given.on, ("--swiglu", "--squared-relu", "--disable-bias-linear"))):
        t.ignore("there is no GELU with a bias", "--no-bias-gelu-fusion")
    if not t.given.on("--swiglu"):
        t.ignore("there is no SwiGLU", "--no-bias-swiglu-fusion")
    if not rotary(t):
        t.ignore("there is no RoPE", "--no-rope-fusion")
    return [name for name in _FUSIONS if t.given.on(name) and name not in t.idle]


def _set_fusions(t: Translation, local: bool) -> None:
    left_out = ignore_absent_fusions(t, local)
    if left_out:
        fusions = [name.removeprefix("--no-").removesuffix("-fusion").replace("-", "_") for name in left_out]
        t.set("model_options.unfused", fusions, *left_out)
    precise = ("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling")
    if "--no-masked-softmax-fusion" in left_out and not any(map(t.given.on, precise)):
        missing = f"an unfused softmax in half precision; {precise[0]}"
        t.refuse(missing, "--no-masked-softmax-fusion")


def rotary(t: Translation) -> bool:
    """Whether positions are RoPE's."""
    return (
        t.given.on("--use-rotary-position-embeddings") or t.given.text("--position-embedding-type") == "rope"
    )
