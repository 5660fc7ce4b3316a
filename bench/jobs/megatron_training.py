"""The parallel sizes, the batch and the optimizer of a Megatron-LM job, from the arguments."""

from __future__ import annotations

from math import prod

from spbench.bench.jobs.megatron_container import (
    CONTAINER,
    LARGE_WORKSPACE_ON_BLACKWELL,
    card_of,
    runs_since,
)
from spbench.bench.jobs.megatron_model import layers_of, length_of
from spbench.bench.jobs.megatron_translation import Translation
from spbench.impls.options import LARGEST_OF

_PIPELINE_SPLITS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
#: of interleaved schedules alone
_INTERLEAVED = (
    "--overlap-p2p-communication-warmup-flush",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--no-overlap-p2p-communication",
)
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


def set_schedule(t: Translation) -> None:
    """Set how the pipeline runs."""
    g = t.given
    stages, layers = g.number("--pipeline-model-parallel-size") or 1, layers_of(t) or 0
    each, virtual = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    counted = layers + g.on(_PIPELINE_SPLITS[2]) + g.on(_PIPELINE_SPLITS[3])
    chunks, name = g.number(virtual) or 1, virtual
    if (of_each := g.number(each)) is not None:
        name = each
        if g.on(virtual):
            t.problems.append(f"{each} and {virtual} are both given; leave one")
        if of_each < 1 or counted % (stages * of_each):
            t.problems.append(f"--num-layers {layers} is no multiple of {stages} stages x {t.spelled(each)}")
            return
        chunks = counted // (stages * of_each)
    if chunks > 1 and stages == 1:
        t.problems.append(f"{t.spelled(name)} needs --pipeline-model-parallel-size of 2 or more")
    parts = stages * max(1, chunks)
    if parts > 1 and parts > min(counted, LARGEST_OF["layers"]):
        t.problems.append(f"{counted} layers are fewer than {parts} stages or parts of these")
        return
    _set_stages(t, layers, stages, max(1, chunks))
    if chunks > 1:
        t.set("training.schedule", "interleaved", name)
        t.set("training.virtual_stages", chunks, name)
        waits, group = "--no-overlap-p2p-communication", "--microbatch-group-size-per-virtual-pipeline-stage"
        t.set("training.overlap_p2p_communication", not g.on(waits), waits)
        if g.on(waits) and stages < 3:
            t.problems.append(
                f"{waits} with virtual stages needs --pipeline-model-parallel-size of 3 or more"
            )
        if (size := g.number(group)) is not None:
            t.set("training.microbatch_group_size", size, group)
        moved = "transfers of the warm-up and of the flush, below the peak; their time is not modelled"
        t.ignore(moved, "--overlap-p2p-communication-warmup-flush")
        return
    t.ignore("a rank has one run of layers", each, virtual, *_INTERLEAVED)


def _set_stages(t: Translation, layers: int, stages: int, chunks: int) -> None:
    """Set how many layers each stage has, as get_num_layers_to_build of Megatron-Core does."""
    g = t.given
    first, last = (g.number(name) for name in _PIPELINE_SPLITS[:2])
    embedding, loss = (g.on(name) for name in _PIPELINE_SPLITS[2:])
    if stages == 1:
        t.ignore("there is one stage", *_PIPELINE_SPLITS)
        return
    if (embedding or loss) and (first is not None or last is not None):
        t.problems.append(f"{_PIPELINE_SPLITS[2 if embedding else 3]} and a number of layers are both given")
        return
    between = [*range(first is not None, stages - (last is not None))]
    left = layers + embedding + loss - (first or 0) - (last or 0)
    if left < 0 or (left % len(between) if between else left):
        t.problems.append(f"{left} layers cannot be split evenly over {len(between)} stages")
        return
    of_rank = [left // len(between) if between else 0] * stages
    for rank, given in ((0, first), (stages - 1, last)):
        of_rank[rank] = of_rank[rank] if given is None else given
    if any(n % chunks for n in of_rank):
        t.problems.append(f"stages of {of_rank} layers cannot be split into {chunks} parts each")
        return
    sizes = [n // chunks for n in of_rank] * chunks
    sizes[0] -= embedding
    sizes[-1] -= loss
    if len({*sizes}) > 1:
        t.set("training.stage_layers", sizes, *_PIPELINE_SPLITS)
    else:
        t.ignore("the stages have as many layers anyway", *_PIPELINE_SPLITS)


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
        t.problems += [f"{sharded} needs {needed}" for needed, there in needs.items() if not there]
        t.ignore(f"{sharded} reduces and gathers by itself", *flags.values(), "--ddp-bucket-size")
        t.ignore(f"{sharded} has no main gradients", "--no-gradient-accumulation-fusion")
        _set_moments(t, cluster)
        return
    t.ignore(f"without {sharded} there is none", late)
    t.set("training.backend", "megatron", note="DistributedDataParallel and optimizer of Megatron-Core")
    for option, name in flags.items():
        if g.on(name):
            t.set(f"training.{option}", True, name)
    if g.on("--overlap-param-gather"):
        for needed in ("--use-distributed-optimizer", "--overlap-grad-reduce"):
            if not g.on(needed):
                t.problems.append(f"--overlap-param-gather needs {needed}")
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
    t.refuse("gathering weights within the optimizer's step", "--overlap-param-gather-with-optimizer-step")
    _set_moments(t, cluster)


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
    variable = "CUBLAS_WORKSPACE_CONFIG"
    if variable in t.environment:
        t.set("training.cublas_workspace", t.environment[variable], variable)
    elif t.given.on("--deterministic-mode"):
        t.set("training.cublas_workspace", ":4096:8", "--deterministic-mode")
    elif card_of(cluster)[1] >= 10 and runs_since(t, LARGE_WORKSPACE_ON_BLACKWELL):
        t.set("training.cublas_workspace", ":4096:8", CONTAINER, note="torch's default on Blackwell")
    t.ignore("slower kernels, whose times are not modelled", "--deterministic-mode")
    t.set("training.moments", "later", note="a first step, before Adam has made its moments,")
    one = t.given.text("--train-iters") == "1"
    t.set("training.steps", 1 if one else 2, note="and the only one" if one else "and one after it")
