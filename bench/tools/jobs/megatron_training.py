"""The parallel sizes, the batch and the optimizer of a Megatron-LM job, from the arguments."""

from __future__ import annotations

from math import prod

from spbench.bench.tools.jobs.megatron_container import set_workspace
from spbench.bench.tools.jobs.megatron_model import length_of
from spbench.bench.tools.jobs.megatron_translation import Translation

#: by --cp-comm-type: the strategy within tensor parallelism's, and whether it takes chunks in zigzag
CONTEXT = {"p2p": ("ring_attention", True), "a2a": ("ulysses", False), "all_gather": ("all_gather_kv", True)}


def set_parallelism(t: Translation, gpus: int | None) -> int | None:
    """Set strategy, sizes and mesh; returns how many replicas there are."""
    g = t.given
    names = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "sp": "--context-parallel-size",
    }
    sizes = {axis: g.number(name) or 1 for axis, name in names.items()}
    for axis, name in names.items():
        if sizes[axis] < 1:
            t.problems.append(f"{t.spelled(name)} is no number of ranks")
            return None
    parts = prod(sizes.values())
    replicas = gpus // parts if gpus is not None else None
    if gpus is not None and gpus % parts:
        t.problems.append(
            f"{gpus} GPUs are no multiple of tensor x pipeline x context parallel sizes, which are {parts}"
        )
        replicas = None
    sequence_parallel = g.on("--sequence-parallel") and sizes["tp"] > 1
    t.ignore("Megatron-LM leaves it off at --tensor-model-parallel-size 1", "--sequence-parallel")
    strategy = "megatron_sp" if sequence_parallel else "tensor_parallel"
    options = {"vocabulary": "split"} if sequence_parallel else {}
    axes, context = ["pp", "dp", "sp", "tp"], ""
    from_context: tuple[str, ...] = ()
    if sizes["sp"] > 1:
        context = _context(t)
        from_context = ("--context-parallel-size", "--cp-comm-type")
        if context == "ulysses+ring_attention":
            axes = ["pp", "dp", "cp", "sp", "tp"]
            from_context += ("--hierarchical-context-parallel-sizes",)
        if context != "ulysses":
            options["placement"] = "zigzag"
        strategy = f"{strategy}+{context}"
    t.ignore("there is no context parallelism", "--cp-comm-type", "--hierarchical-context-parallel-sizes")
    t.set("strategy", strategy, *(("--sequence-parallel",) if sequence_parallel else ()), *from_context)
    if "vocabulary" in options:
        t.set("strategy_options.vocabulary", options["vocabulary"], "--sequence-parallel")
    if "placement" in options:
        t.set("strategy_options.placement", options["placement"], *from_context)
    hierarchy = (g.text("--hierarchical-context-parallel-sizes") or "").split()
    if context == "ulysses+ring_attention" and len(hierarchy) == 2:
        sizes["sp"], cp = map(int, hierarchy)
        t.set("sizes.cp", cp, "--hierarchical-context-parallel-sizes")
        if sizes["sp"] * cp != g.number("--context-parallel-size"):
            t.problems.append("--hierarchical-context-parallel-sizes do not make --context-parallel-size")
    for axis, name in names.items():
        more = ("--hierarchical-context-parallel-sizes",) if axis == "sp" and len(axes) == 5 else ()
        if sizes[axis] > 1:
            t.set(f"sizes.{axis}", sizes[axis], name, *more)
        else:
            t.ignore("one part: not split", name)
    if replicas is not None:
        t.set("sizes.dp", replicas, note=f"{gpus} GPUs / {parts} (tensor x pipeline x context)")
    if g.on("--use-tp-pp-dp-mapping"):
        axes[0], axes[1] = axes[1], axes[0]
    t.set("mesh", axes, "--use-tp-pp-dp-mapping")
    return replicas


def _context(t: Translation) -> str:
    """The strategy of context parallelism."""
    kinds = set((t.given.text("--cp-comm-type") or "p2p").split())
    if kinds == {"a2a+p2p"}:
        if len((t.given.text("--hierarchical-context-parallel-sizes") or "").split()) != 2:
            t.problems.append("--cp-comm-type a2a+p2p needs two --hierarchical-context-parallel-sizes")
        return "ulysses+ring_attention"
    if len(kinds) > 1 or not kinds <= CONTEXT.keys():
        t.refuse("this kind of context parallelism, or several in one model", "--cp-comm-type")
        return "ring_attention"
    return CONTEXT[kinds.pop()][0]


def set_batch(t: Translation, replicas: int | None) -> None:
    """Set batch, length and precision."""
    g = t.given
    length = length_of(t)
    if length is None:
        t.problems.append("--seq-length is missing")
    t.set("seq_len", length, "--seq-length", "--encoder-seq-length")
    context = g.number("--context-parallel-size") or 1
    if context > 1 and length is not None and length % (2 * context):
        t.problems.append(f"--seq-length {length} is no multiple of 2 x --context-parallel-size {context}")
    if g.on("--bf16") and g.on("--fp16"):
        t.problems.append("--bf16 and --fp16 are both given; leave one")
    precision = "bf16" if g.on("--bf16") else "fp16" if g.on("--fp16") else "fp32"
    t.set("precision", precision, "--bf16", "--fp16")
    micro = g.number("--micro-batch-size")
    schedule, whole = g.text("--step-batch-size-schedule"), g.number("--global-batch-size")
    name = "--global-batch-size"
    if schedule is not None:
        if whole is not None:
            t.problems.append(f"--step-batch-size-schedule and {name} are both given; leave one")
        first = schedule.split()[0].rpartition(":")[2] if schedule.split() else ""
        if not first.isdecimal():
            t.problems.append(f"--step-batch-size-schedule {schedule!r} is not TOKENS:BATCH ...")
            return
        whole, name = int(first), "--step-batch-size-schedule"
        t.remarks.append("the batch is the first of the schedule; later ones have more micro-batches")
    if micro is None or replicas is None:
        t.ignore("the replicas are not known", name, "--micro-batch-size")
        return
    note = ""
    if whole is None:
        whole, note = micro * replicas, "one micro-batch a replica"
    if micro < 1 or whole < 1 or whole % (micro * replicas):
        t.problems.append(
            f"{name} {whole} is no multiple of --micro-batch-size {micro} x {replicas} replicas"
            f"{'' if t.given.on(name) else ' (by default)'}"
        )
        t.ignore("they do not divide", name, "--micro-batch-size")
        return
    t.set("batch", whole, name, *(("--micro-batch-size",) if note else ()), note=note)
    t.set(
        "training.micro_batches",
        whole // (micro * replicas),
        "--micro-batch-size",
        note=f"{whole} / ({micro} x {replicas} replicas)",
    )


def set_optimizer(t: Translation, cluster: str | None) -> None:
    """Set data parallelism and the optimizer."""
    g = t.given
    if g.text("--optimizer") != "adam":
        t.refuse("another optimizer than Adam", "--optimizer")
    t.ignore("Adam is what there is", "--optimizer")
    sharded, late = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"
    flags = {
        "distributed_optimizer": "--use-distributed-optimizer",
        "overlap_grad_reduce": "--overlap-grad-reduce",
        "overlap_param_gather": "--overlap-param-gather",
    }
    if g.on(sharded):
        t.set("training.backend", "zero2" if g.on(late) else "zero3", sharded, late)
        t.remarks.append(f"{sharded} is taken for {'zero2' if g.on(late) else 'zero3'}, FSDP2 by layer")
        untied, fusion = "--untie-embeddings-and-output-weights", "--no-gradient-accumulation-fusion"
        needs = {untied: g.on(untied), fusion: g.on(fusion), "no --fp16": not g.on("--fp16")}
        needs["--pipeline-model-parallel-size 1"] = (g.number("--pipeline-model-parallel-size") or 1) == 1
        needs["no --use-distributed-optimizer"] = not g.on("--use-distributed-optimizer")
        queues = "CUDA_DEVICE_MAX_CONNECTIONS"
        needs[f"no {queues}=1"] = t.environment.get(queues) != "1"
        t.problems += [f"{sharded} needs {needed}" for needed, there in needs.items() if not there]
        t.ignore(f"{sharded} reduces and gathers by itself", *flags.values(), "--ddp-bucket-size")
        t.ignore(f"{sharded} has no main gradients", "--no-gradient-accumulation-fusion")
        t.refuse("FSDP2 with Megatron-LM's optimizer on the host", "--optimizer-cpu-offload")
        _set_moments(t, cluster)
        return
    t.ignore(f"without {sharded} there is none", late)
    t.set("training.backend", "megatron", note="DistributedDataParallel and optimizer of Megatron-Core")
    for option, name in flags.items():
        if g.on(name):
            t.set(f"training.{option}", True, name)
    _set_alignment(t)
    early = "--overlap-param-gather-with-optimizer-step"
    pairs = [("--overlap-param-gather", "--use-distributed-optimizer")]
    pairs += [("--overlap-param-gather", "--overlap-grad-reduce"), (early, "--overlap-param-gather")]
    for name, needed in pairs:
        if g.on(name) and not g.on(needed):
            t.problems.append(f"{name} needs {needed}")
    if g.on(early):
        t.remarks.append(f"{early}: the first all-gather starts after all of the optimizer's step")
        t.leave("time", "an all-gather of the same buffers starts earlier", early)
    _set_offloading(t)
    fusion = "--no-gradient-accumulation-fusion"
    t.set("training.gradient_accumulation_fusion", not g.on(fusion), fusion)
    _set_main_gradients(t)
    if (size := g.number("--ddp-bucket-size")) is not None:
        t.set("training.bucket_size", size, "--ddp-bucket-size")
    padded = "--ddp-pad-buckets-for-high-nccl-busbw"
    if g.on(padded):
        t.set("training.pad_buckets_for_high_nccl_busbw", True, padded)
    instances = "--num-distributed-optimizer-instances"
    if (g.number(instances) or 1) != 1:
        t.set("training.num_distributed_optimizer_instances", g.number(instances), instances)
    t.refuse("a gradient of the embedding's weights that is put off", "--defer-embedding-wgrad-compute")
    t.ignore("of --defer-embedding-wgrad-compute", "--wgrad-deferral-limit")
    _set_moments(t, cluster)


def _set_alignment(t: Translation) -> None:
    """Set when the stages of a pipeline begin to gather weights, which one run of layers a rank does not say:
    there each stage begins as it needs them, aligned or not."""
    g, apart = t.given, "--no-align-param-gather"
    chunks = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
    if not g.on("--overlap-param-gather"):
        t.ignore("weights are gathered at once, after the optimizer's step", apart)
    elif not any(map(g.on, (*chunks, "--pipeline-model-parallel-layout"))):
        t.ignore("so it is where a rank has one run of layers", apart)
    elif g.on(apart):
        t.set("training.align_param_gather", False, apart)


def _set_offloading(t: Translation) -> None:
    """Set the optimizer's place, for which Megatron-LM has the path of its precision-aware optimizer."""
    g, aware, torchs = t.given, "--use-precision-aware-optimizer", "--use-torch-optimizer-for-cpu-offload"
    offloaded, overlapped = "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"
    t.ignore("main weights, gradients and moments are float32 as without it", aware)
    if not g.on(offloaded):
        t.ignore(f"of {offloaded}", overlapped, torchs)
        return
    t.problems += [
        f"{offloaded} needs {name}" for name in (aware, "--use-distributed-optimizer") if not g.on(name)
    ]
    t.set("training.optimizer", "host", offloaded)
    t.set("training.overlap_cpu_optimizer_d2h_h2d", g.on(overlapped), overlapped)


def _set_main_gradients(t: Translation) -> None:
    g = t.given
    whole, half = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
    if g.on("--bf16"):
        t.ignore("is so with --bf16", whole)
        if g.on(half):
            t.set("training.accumulate_allreduce_grads_in_fp32", False, half)
    elif g.on("--fp16"):
        t.ignore("--bf16 is not given", half)
        t.set("training.accumulate_allreduce_grads_in_fp32", g.on(whole), whole)
    else:
        t.ignore("all is in float32", whole, half)


def _set_moments(t: Translation, cluster: str | None) -> None:
    g = t.given
    set_workspace(t, cluster)
    if g.on("--fp16"):
        t.ignore("gradients are checked for overflow with a fixed scale too", "--loss-scale")
    micro, of_evaluation = g.number("--micro-batch-size") or 1, "--eval-micro-batch-size"
    if (g.number(of_evaluation) or 0) <= micro:
        t.ignore("evaluation holds no more than a step of training", of_evaluation)
    if g.on("--deterministic-mode"):
        t.remarks.append("kernels of --deterministic-mode are slower, which is not modelled")
        t.took("see what is approximate", "--deterministic-mode")
    t.set("training.moments", "later", note="a first step, before Adam has made its moments,")
    one = g.text("--train-iters") == "1"
    t.set("training.steps", 1 if one else 2, note="and the only one" if one else "and one after it")
