"""Jobs of NeMo Automodel: its YAML of a causal language model under FSDP2."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import configuration, values_of
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.transformers_step import (
    Adapted,
    Said,
    TransformersStep,
    said,
    said_in_table,
)
from spbench.bench.tools.jobs.variables import variables
from spbench.impls import LATENT, PROJECTIONS

_HALF = {"bf16", "bfloat16", "torch.bfloat16"}
_KEPT, _EXPERTS_KEPT = "distributed.reshard_after_forward", "distributed.moe.reshard_after_forward"
_PEFT, _FP8 = "peft._target_", "fp8.enabled"
_TE_FP8, _NORM = "model.backend.te_fp8.recipe", "model.backend.rms_norm"
#: by the words of model.backend.te_fp8: ours for TransformerEngine's recipes
_TE_RECIPES = {"current": "tensorwise", "block": "blockwise", "mxfp8": "mxfp8"}
_BUILT = "model._target_"
#: of a pipeline: within the section distributed, or a section of its own in older files
_PIPELINES = ("distributed.pipeline.", "autopipeline.")
#: by classes of components/loss whose logits stay in their precision: ours
_LOSSES = {"TEParallelCrossEntropy": "in_place", "ChunkedCrossEntropy": "compiled"}
_STRATEGIES = {"ddp": "ddp", "megatron_fsdp": "zero3", "mfsdp": "zero3", "megatron-fsdp": "zero3"}


def read(files: JobFiles) -> Job | None:
    """A job of NeMo Automodel; None where no file is its configuration.

    Raises:
        UserError: a file is damaged.
    """
    content = configuration(files, ("step_scheduler", "model"))
    if content is None or not isinstance(content["model"], dict):
        return None
    table = argument_table("automodel")
    k = key_account(
        table,
        values_of(files, content, table),
        lambda name: not name.endswith("_target_") or name in table.arguments,
        files.environment,
    )
    set_step(k, _step(k), files)
    k.environment = {str(n): str(v) for n, v in (k.value("ci.env_vars") or {}).items()}
    k.took("variables of the environment", "ci.env_vars")
    arguments: list[Argument] = [*k.arguments(), *variables(k)]
    return k.job("automodel", files, arguments)


def _step(k: Account) -> TransformersStep:
    if k.has(_BUILT) and "ForCausalLM" not in str(k.value(_BUILT)):
        k.refuse("a model that is no causal language model, or is built from values of the file", _BUILT)
    k.ignore("a causal language model", _BUILT)
    value, dtype = k.chosen("model.torch_dtype", "model.dtype")
    half = str(value) in _HALF or value in (None, "auto")
    optimizer, target = str(k.value("optimizer._target_")), k.given_of("optimizer._target_")
    return TransformersStep(
        **said_in_table(k),
        length=_length(k),
        sharding=_sharding(k),
        **_loss(k),
        **_pipeline(k),
        deferred=_deferred(k),
        half=Said(half, k.given_of(dtype)),
        recompute=_recompute(k),
        fused=_kernels(k),
        optimizer=_optimizer(k, optimizer, half),
        foreach=Said(_foreach(k, optimizer), target, "torch's default"),
        lora=Said(k.value("peft.dim") if k.has(_PEFT) else 0, k.given_of(_PEFT, "peft.dim")),
        **_adapted(k),
        liger=_fused(k),
        fp8=_fp8(k),
        library=Said("transformer-engine" if k.has(_TE_FP8) else "torch", k.given_of(_TE_FP8)),
    )


def _adapted(k: Account) -> dict[str, Any]:
    """Which modules have adapters (components/_peft/module_matcher.py)."""
    every, some, others = "peft.match_all_linear", "peft.target_modules", "peft.exclude_modules"
    named, without = k.value(some) or [], k.value(others) or []
    named = [named] if isinstance(named, str) else named
    if without:
        named = [
            each for each in (*PROJECTIONS, *LATENT) if not any(fnmatchcase(each, name) for name in without)
        ]
    elif k.value(every):
        named = ["all-linear", "lm_head"]
    dora = said(k, "peft.use_dora")
    experts = any(fnmatchcase("model.layers.0.mlp.experts", name) for name in named)
    return {
        "adapted": Adapted(Said(named or None, k.given_of(every, some, others)), by_direction=dora),
        "adapted_experts": Said("each" if experts else "frozen"),
    }


def _deferred(k: Account) -> Said:
    """Whether gradients wait for the last micro-batch, and weights with them (moe/fsdp_mixin.py)."""
    last, kept = "distributed.defer_fsdp_grad_sync", "model.backend.enable_fsdp_optimizations"
    return Said("kept" if k.value(kept) else "last" if k.value(last) else "", k.given_of(last, kept))


def _ranks(k: Account, axis: str) -> Said:
    """Ranks of an axis; 1 where it is null or "none"."""
    name = f"distributed.{axis}"
    value = k.value(name)
    return Said(1 if value in (None, "none") else value, k.given_of(name))


def _sharding(k: Account) -> Said:
    """FSDP2, whose units keep their weights after forward in a pipeline, and by default where experts are
    spread over ranks."""
    strategy = str(k.value("distributed.strategy") or "fsdp2").lower()
    names = k.given_of("distributed.strategy", _KEPT, _EXPERTS_KEPT)
    if strategy in _STRATEGIES:
        if strategy != "ddp":
            because = "torch's fully_shard stands for it: a layer a unit, gradients in parts at once"
            k.stand_in(
                "Megatron-FSDP around a transformers model",
                "time and memory",
                because,
                "distributed.strategy",
            )
        return Said(_STRATEGIES[strategy], names)
    if strategy != "fsdp2":
        k.refuse("another distribution than FSDP2", "distributed.strategy")
    freed = k.value(_KEPT)
    spread = _ranks(k, "ep_size").value != 1
    if freed is None and spread:
        freed = bool(k.value(_EXPERTS_KEPT))
    elif freed is None:
        freed = _ranks(k, "pp_size").value == 1
    k.ignore("experts are not spread over ranks", *([] if spread else k.given_of(_EXPERTS_KEPT)))
    return Said("fsdp" if freed else "fsdp, kept", names)


def _pipeline(k: Account) -> dict[str, Any]:
    below = next((each for each in _PIPELINES if k.has(f"{each}pp_schedule")), _PIPELINES[0])
    if k.value(csv := f"{below}pp_schedule_csv"):
        k.refuse("a schedule that is written out", csv)
    return {
        "pipeline": _ranks(k, "pp_size"),
        "schedule": said(k, f"{below}pp_schedule"),
        "stage_layers": said(k, f"{below}layers_per_stage"),
        "rounded": said(k, f"{below}round_virtual_stages_to_pp_multiple"),
        "piece": said(k, f"{below}pp_microbatch_size"),
    }


def _recompute(k: Account) -> Said:
    """Layers run again, also where an older section says so."""
    names = "distributed.activation_checkpointing", "parallelizer.activation_checkpointing"
    value = next((k.value(name) for name in names if k.value(name)), False)
    if str(value).lower() == "selective":
        because = "whole layers run again, not what is cheap in them"
        k.stand_in(
            "activation checkpointing by operator in Automodel",
            "time and memory",
            because,
            *k.given_of(*names),
        )
    return Said(bool(value), k.given_of(*names))


def _optimizer(k: Account, target: str, half: bool) -> Said:
    given = k.given_of("optimizer._target_")
    kind = "adam" if "Adam" in target else "muon" if "Muon" in target else target
    if half and "FusedAdam" in target:
        because = "moments are counted in bfloat16: the job has 4 bytes a weight, over the ranks, more"
        k.stand_in("float32 moments beside bfloat16 weights", "memory", because, *given)
    return Said(kind, given)


def _loss(k: Account) -> dict[str, Any]:
    """The kernel of a loss of logits, those that ranks of tensor parallelism give it (components/loss:
    masked_ce.py, te_parallel_ce.py, chunked_ce.py), and that the caller's ``out`` lives through backward
    (recipes/llm/train_ft.py)."""
    target, precise = "loss_fn._target_", "loss_fn.fp32_upcast"
    kind, names = str(k.value(target)).rpartition(".")[2], k.given_of(target, precise)
    split, rounded = kind == "TEParallelCrossEntropy", not k.value(precise)
    way = _LOSSES.get(kind, "as_given" if rounded else "plain")
    gathered = "gathered" if rounded or kind in _LOSSES else "gathered_float32"
    held = way != "in_place" and _ranks(k, "pp_size").value == 1
    return {
        "tensor_loss": Said("parallel" if split else gathered, names, "full_tensor() of the logits"),
        "cross_entropy": Said(way, names),
        "logits_held": Said("as_made" if held else "none", (), "out"),
    }


def _fused(k: Account) -> Said:
    """Which kernels stand for several: the norm's, and those of head and loss without logits."""
    loss, own = "loss_fn._target_", "model.use_liger_kernel"
    if k.value(own):
        because = "Liger's norms and MLPs of models that Automodel has no layers for are torch's here"
        k.leave("time and memory", because, own)
    k.ignore("no kernel is Liger's", own)
    # torch_fp32, the default of its own layers, is compiled (components/models/common/utils.py)
    words = ["norm"] if any(name.startswith("model.backend.") for name in k.given) else []
    if str(k.value(loss)).endswith("FusedLinearCrossEntropy"):
        words.append("loss")
        because = "Liger's tiles of head and loss stand for it: neither keeps logits"
        k.stand_in("Cut Cross-Entropy", "time and memory", because, loss)
    elif not str(k.value(loss)).endswith(("MaskedCrossEntropy", "None", *_LOSSES)):
        k.leave("time and memory", "logits are kept whole, and in float32", loss)
    k.ignore("a loss of the logits, as there is", loss)
    return Said(" ".join(words), k.given_of(_NORM, *([loss] if "loss" in words else [])))


def _kernels(k: Account) -> Said:
    """What its own layers have a kernel for (components/moe/experts.py: get_expert_activation_for_deepep, and
    the dispatcher with moe_permute_fusion; components/models/common/utils.py)."""
    experts, rope = "model.backend.experts", "model.backend.rope_fusion"
    words = ["swiglu", "permutation"] if k.value(experts) not in (None, "torch") else []
    words += ["rope"] if k.value(rope) else []
    return Said(" ".join(words), k.given_of(experts, rope))


def _foreach(k: Account, optimizer: str) -> bool:
    """Whether torch's own default updates weights: neither a fused kernel, nor a weight after the other."""
    plain = k.has("optimizer.foreach") and not k.value("optimizer.foreach")
    k.took("the optimizer's kernel", *k.given_of("optimizer.foreach", "optimizer.fused"))
    return optimizer.startswith("torch.optim.") and not k.value("optimizer.fused") and not plain


def _fp8(k: Account) -> Said:
    """Matmuls in eight bits, by TransformerEngine's recipes or torchao's."""
    if k.value(_TE_FP8) in _TE_RECIPES:
        linear, experts = (k.value(f"model.backend.{each}") for each in ("linear", "experts"))
        if "te" not in (linear, experts) or linear != experts:
            because = "all projections are in eight bits, of attention and of experts alike"
            k.stand_in("eight bits in a part of the layers", "time and memory", because, _TE_FP8)
        return Said(_TE_RECIPES[k.value(_TE_FP8)], (_TE_FP8,))
    if k.has(_TE_FP8):
        k.refuse("another recipe of TransformerEngine", _TE_FP8)
    recipe, filtered, gathered = "fp8.recipe_name", "fp8.filter_fqns", "fp8.enable_fsdp_float8_all_gather"
    if not k.value(_FP8):
        k.ignore("no matmul is in eight bits", *k.given_of(_FP8, recipe, filtered, gathered))
        return Said("")
    if k.value(filtered) not in (["lm_head"], ["output"]):
        because = "each projection of a layer is in eight bits, and the head is not"
        k.stand_in("a choice of layers for eight bits", "time", because, filtered)
    k.took("the head stays as it is", filtered)
    if k.value(gathered):
        k.leave("time and memory", "weights are gathered in sixteen bits and cast then", gathered)
    k.ignore("weights are gathered in sixteen bits", gathered)
    return Said(k.value(recipe) or "tensorwise", k.given_of(_FP8, recipe), "torchao's recipe")


def _length(k: Account) -> Said:
    names = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length")
    given = [name for name in names if k.value(name)]
    first = [*given, names[-1]][0]
    k.ignore(f"rows have the length of {first}", *k.given_of(*names))
    return Said(k.value(first), (first,))
