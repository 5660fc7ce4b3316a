"""What of a Megatron-LM job depends on the card and on the container of PyTorch: the kernel of attention,
fused operators, workspaces, and matmuls in eight bits, by TransformerEngine's recipes.
"""

from __future__ import annotations

import re

from spbench.bench.errors import UserError
from spbench.bench.measure import Device, engines_choice, generation_of, load_cluster
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_hybrid import pattern_of
from spbench.bench.units import gib

#: the variable that says the release of NVIDIA's container of PyTorch, and which it sets itself: "24.01"
CONTAINER = "NVIDIA_PYTORCH_VERSION"
#: the release with TransformerEngine 1.3: FlashAttention 2 (of 2.4.1 on) also where algorithms must be
#: deterministic (DotProductAttention of its pytorch/attention.py at v1.2 and at v1.3)
DETERMINISTIC_FLASH_ATTENTION = (24, 2)
#: the release with TransformerEngine 1.10, to which a BertModel gives the mask of its keys
#: (bert_model.py of Megatron-Core, _sanity_check_attention_and_get_attn_mask_dimension)
MASK_OF_KEYS = (24, 9)
#: the release with torch 2.12: cuBLAS's workspace on Blackwell is Hopper's
#: (parseChosenWorkspaceSize, changed by pytorch/pytorch#175344)
LARGE_WORKSPACE_ON_BLACKWELL = (26, 4)
#: the releases with torch 2.3, 2.6 and 2.7, as far as they change what torch.compile allocates while it
#: times kernels (:class:`Autotuning`): how many tensors that the last kernel overwrites are copied, where
#: copies are made, and how large the buffer is. The first is known of 24.01 (two) and 24.10 (one) alone
ONE_COPY, COPIES_ON_HOST, FLUSHES_L2 = (24, 3), (24, 11), (25, 3)
#: bytes of the data loader's mask, one for each query and key, from which on it is worth a word
_LARGE_MASK = 2**30
#: switches that leave out a fusion
_FUSIONS = (
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-rope-fusion"),
)
#: variables of TransformerEngine that allow a kernel, and its --attention-backend
_ALLOWING = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}


def release_of(a: Account) -> tuple[int, int] | None:
    """The release of the job's container, as (year, month); None where it is not said."""
    parts = re.fullmatch(r"(\d\d)\.(\d\d)", a.environment.get(CONTAINER, ""))
    return (int(parts[1]), int(parts[2])) if parts else None


def runs_before(a: Account, release: tuple[int, int]) -> bool:
    """Whether the job's container is said, and older than a release (year, month)."""
    return (release_of(a) or release) < release


def container_problems(a: Account) -> list[str]:
    """What is wrong with how the container is said."""
    if CONTAINER not in a.environment or release_of(a) is not None:
        return []
    return [f"{a.spelled(CONTAINER)} is no release of NVIDIA's container, such as 25.09"]


def _device(cluster: str | None) -> Device | None:
    try:
        return load_cluster(cluster).device if cluster is not None else None
    except UserError:
        return None  # raised again with the cell


def card_of(cluster: str | None) -> tuple[str, int]:
    """The name of a cluster's card and its generation; ("", 0) where it is not known."""
    device = _device(cluster)
    return ("", 0) if device is None else (device.name, generation_of(device))


def set_workspace(a: Account, cluster: str | None) -> None:
    """Set cuBLAS's workspace, where it is not what the cluster has."""
    option, variable, large = "training.cublas_workspace", "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    if variable in a.environment:
        a.set(option, a.environment[variable], variable)
    elif a.has("--deterministic-mode"):
        a.set(option, large, "--deterministic-mode")
    elif card_of(cluster)[1] >= 10 and (release_of(a) or (0, 0)) >= LARGE_WORKSPACE_ON_BLACKWELL:
        a.set(option, large, CONTAINER, note="torch's default on Blackwell")


def set_autotuning(a: Account, cluster: str | None) -> None:
    """Set what torch.compile allocates while it times the kernels of the loss, in the first step."""
    if a.has("--deterministic-mode"):
        return  # it times none
    device, flush = _device(cluster), "model_options.autotune_flush_kib"
    cache = device.l2_cache_bytes.value if device is not None else None
    if runs_before(a, FLUSHES_L2):
        a.set(flush, 256_000_000 // 2**10, CONTAINER, note="256 MB, of torch.compile in the first step")
    elif cache is None:
        a.remarks.append(
            "in its first step torch.compile needs as much as the card's L2 cache has: not known"
        )
    else:
        a.set(flush, cache // 2**10, note="the L2 cache, of torch.compile in the first step")
    if runs_before(a, COPIES_ON_HOST):
        copies = 2 if runs_before(a, ONE_COPY) else 1
        a.set("model_options.autotune_copies", copies, CONTAINER, note="of what its kernels overwrite")


def set_state_processors(a: Account, cluster: str | None) -> None:
    """Set the multiprocessors over which backward of Mamba-2 spreads heads."""
    device = _device(cluster)
    if "M" in pattern_of(a) and device is not None and (count := device.multiprocessors.value):
        a.set("model_options.state_processors", count, note=f"multiprocessors of {device.name}")


def set_attention(a: Account, local: bool, cluster: str | None) -> None:
    """Set heads, the kernel of attention, fused operators, and the mask of the data loader."""
    if a.has("--group-query-attention"):
        groups = a.value("--num-query-groups")
        a.set("model_options.kv_heads", groups, "--group-query-attention", "--num-query-groups")
    else:
        a.ignore("without --group-query-attention each head has its own", "--num-query-groups")
    if not a.has("--multi-latent-attention"):  # whose latents have the norms
        a.map_given("--qk-layernorm")
    if pattern_of(a) and (a.value("--context-parallel-size") or 1) > 1:
        # heads that are exchanged have no dropout here, whose state is a seed in fused attention
        a.set("model_options.attention_dropout", 0.0, "--attention-dropout", note="left out")
        a.leave("nothing", "fused attention keeps a seed, no mask", "--attention-dropout")
    else:
        a.map("--attention-dropout")
        if (a.value("--context-parallel-size") or 1) > 1 and a.value("--attention-dropout") > 0 and _cut(a):
            mend = "give --attention-dropout 0.0, or --cp-comm-type a2a"
            a.refuse(f"dropout of attention over parts of a sequence ({mend})", "--attention-dropout")
    option, name, versions = "model_options.attention", "--attention-backend", "--flash-attention-version"
    asked, version = a.value(name), a.value(versions)
    if local:
        a.ignore("--transformer-impl local has unfused attention alone", name, versions)
        a.set(option, "unfused", "--transformer-impl", "--spec", note="its only attention")
    elif asked in ("unfused", "fused"):
        a.set(option, "cudnn" if asked == "fused" else asked, name)
    elif asked == "local":
        a.refuse_given("the attention of --spec local without it", name)
    elif asked == "flash":
        kernel = "flash" if version is None else f"flash_attention_{version}"
        a.set(option, kernel, name, *([] if version is None else [versions]))
    elif cluster is None:
        a.ignore("TransformerEngine chooses by the card, which --cluster says", name)
    else:
        _choose_attention(a, cluster)
    a.ignore("attention is not FlashAttention", versions)
    _check_switches(a, local, asked or "auto")
    a.map("--no-create-attention-mask-in-dataloader")
    length = a.value("--seq-length") or a.value("--encoder-seq-length") or 0
    held = (a.value("--micro-batch-size") or 1) * length**2
    if held >= _LARGE_MASK and not a.has("--no-create-attention-mask-in-dataloader"):
        a.remarks.append(
            f"the data loader makes a mask of {gib(held)} GiB for the first and the last stage; "
            "--no-create-attention-mask-in-dataloader makes none"
        )
    _set_fusions(a, local)


def _cut(a: Account) -> bool:
    """Whether ranks of context parallelism have parts of a sequence, not of the heads, within attention."""
    return {*str(a.value("--cp-comm-type") or "p2p").split()} != {"a2a"}


def _choose_attention(a: Account, cluster: str) -> None:
    """The kernel that TransformerEngine takes where it may (:func:`engines_choice`, and
    nvte_get_fused_attn_backend)."""
    card, generation = card_of(cluster)
    fixed = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    off = {name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if a.environment.get(name) == "0"}
    deterministic = a.has("--deterministic-mode") or a.environment.get(fixed) == "0"
    dropout = a.value("--attention-dropout") > 0
    fused = "NVTE_FUSED_ATTN" not in off and not (generation >= 10 and deterministic and dropout)
    undetermined = deterministic and runs_before(a, DETERMINISTIC_FLASH_ATTENTION)
    flash = "NVTE_FLASH_ATTN" not in off and not undetermined
    kernel = engines_choice(generation, fused=fused, flash=flash)
    names = ["--attention-backend", *sorted(off)]
    names += [fixed] if deterministic and (generation >= 10 or undetermined) else []
    names += [CONTAINER] if undetermined else []
    note = f"TransformerEngine's choice on {card or 'this card'}"
    a.set("model_options.attention", kernel, *names, note=note)


def _check_switches(a: Account, local: bool, asked: str) -> None:
    """Account for TransformerEngine's variables that allow kernels. Megatron-LM sets them by
    --attention-backend, and refuses to start where they are set otherwise (_set_attention_backend of its
    language_module.py); older versions took them as they were."""
    for name, kernel in _ALLOWING.items():
        value = a.environment.get(name)
        if value is None:
            continue
        if local:
            a.ignore("--transformer-impl local has unfused attention alone", name)
        elif value == str(int(asked in (kernel, "auto"))):
            a.ignore(f"is so with --attention-backend {asked}", name)
        elif asked == "auto":
            a.took("TransformerEngine's choice among the kernels that are left", name)
            a.remarks.append(f"{name}={value} beside --attention-backend auto runs in older versions alone")
        else:
            a.problems.append(f"{name}={value} and --attention-backend {asked} are both given; leave one")


def ignore_absent_fusions(a: Account, local: bool) -> list[str]:
    """Say which fusions there are none of, that could be left out; returns those that are left out."""
    if not local:
        a.ignore("TransformerEngine's softmax is its own", "--no-masked-softmax-fusion")
    if any(map(a.has, ("--swiglu", "--squared-relu", "--disable-bias-linear"))):
        a.ignore("there is no GELU with a bias", "--no-bias-gelu-fusion")
    if not a.has("--swiglu"):
        a.ignore("there is no SwiGLU", "--no-bias-swiglu-fusion")
    if not rotary(a):
        a.ignore("there is no RoPE", "--no-rope-fusion")
    return [name for name in _FUSIONS if a.has(name) and name not in a.idle]


def _set_fusions(a: Account, local: bool) -> None:
    left_out = ignore_absent_fusions(a, local)
    if left_out:
        fusions = [name.removeprefix("--no-").removesuffix("-fusion").replace("-", "_") for name in left_out]
        a.set("model_options.unfused", fusions, *left_out)
    softmax = "--no-masked-softmax-fusion"
    precise = ("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling")
    if softmax in left_out and not any(map(a.has, precise)):
        a.refuse_given(f"an unfused softmax in half precision; {precise[0]}", softmax)


def rotary(a: Account) -> bool:
    """Whether positions are RoPE's."""
    return a.has("--use-rotary-position-embeddings") or a.value("--position-embedding-type") == "rope"


_FORMAT, _RECIPE = "--fp8-format", "--fp8-recipe"
_GATHERED, _REUSED = "--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"
_IN_BF16 = ("--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
#: of scales from the largest magnitudes of earlier steps
_HISTORY = ("--fp8-margin", "--fp8-interval", "--fp8-amax-history-len", "--fp8-amax-compute-algo")
_OTHERS = ("--fp8-quantizer-factory", "--no-fp8-wgrad", "--fp8-output-proj", "--keep-fp8-transpose-cache")
#: recipes with one scale a tensor, and the generation of cards from which on these need no transposed copies
_WHOLE, _ANY_LAYOUT = ("tensorwise", "delayed"), 10


def set_fp8(a: Account, cluster: str | None) -> None:
    """Set the recipe of matmuls in eight bits, if a job has one; refuse those that are not modelled."""
    if not a.has(_FORMAT):
        names = _RECIPE, _GATHERED, _REUSED, *_IN_BF16, *_HISTORY, *_OTHERS
        a.ignore("of matmuls in 8 bits, which the job has not", *names)
        return
    recipe = a.value(_RECIPE)
    if recipe == "custom":
        _refuse(a, "matmuls in 8 bits with a recipe in Python", _RECIPE)
        return
    if a.value("--transformer-impl") == "local":
        _refuse(a, "matmuls in 8 bits without TransformerEngine")
        return
    if a.value("--num-experts") and recipe == "delayed":
        recipe = _without_history(a)
    a.set("model_options.fp8", recipe, _FORMAT, _RECIPE)
    whole = recipe in _WHOLE
    if whole and card_of(cluster)[1] >= _ANY_LAYOUT:
        a.set("model_options.fp8_transposes", False, note="matmuls of Blackwell read either layout")
    _set_history(a, recipe)
    a.refuse_given("gradients of weights in sixteen bits beside matmuls in eight: not modelled", _OTHERS[1])
    a.leave("time", "the head is in sixteen bits", _OTHERS[2])
    a.ignore("of Megatron-FSDP", _OTHERS[3])
    a.ignore("of a recipe in Python", _OTHERS[0])
    if whole and a.has(_GATHERED) and a.has("--use-distributed-optimizer"):
        a.set("training.fp8_param_gather", True, _GATHERED)
    because = "weights are kept and gathered in sixteen bits, and cast in a step's first micro-batch"
    a.leave("memory and time", because, _GATHERED, _REUSED)
    if a.value(_IN_BF16[0]):
        a.leave("memory and time", "the first and the last layers are in eight bits too", *_IN_BF16)
    else:
        a.ignore(f"of {_IN_BF16[0]}", *_IN_BF16[1:])


def _without_history(a: Account) -> str:
    """The recipe that stands for delayed scaling in a model with experts."""
    because = "each cast looks for the largest magnitude of its matrix first, as with --fp8-recipe tensorwise"
    a.stand_in("scales of experts from earlier steps", "time", because, _FORMAT, _RECIPE)
    a.leave("time", because, *_HISTORY)
    return _WHOLE[0]


def _set_history(a: Account, recipe: str) -> None:
    """Set of how many passes a scale heeds the magnitudes."""
    margin, interval, length, algorithm = _HISTORY
    if recipe != "delayed":
        a.ignore("of scales from earlier steps", *_HISTORY)
        return
    if a.value(algorithm) == "max" and a.value(length) > 1:
        a.set("model_options.fp8_history", a.value(length), length, algorithm)
    a.ignore("the most recent magnitude makes a scale, by default", length, algorithm)
    a.leave("nothing", "a power of two in each scale", margin)
    a.ignore("TransformerEngine sets scales in each pass", interval)
    if a.value(_IN_BF16[0]):
        a.problems.append(f"{_IN_BF16[0]} does not go with --fp8-recipe delayed, in Megatron-LM too")


def _refuse(a: Account, missing: str, *names: str) -> None:
    """Refuse eight bits by what is missing, and with them what is said of them."""
    a.refuse(missing, _FORMAT, *names)
    a.refuse_given(f"{missing}: not modelled", _RECIPE, _GATHERED, _REUSED, *_IN_BF16, *_HISTORY, *_OTHERS)
