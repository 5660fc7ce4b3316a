"""The pipeline and the optimizer of a Megatron-LM job, from the arguments."""

from __future__ import annotations

import re

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_hybrid import pattern_of, set_muon, stages_of
from spbench.bench.tools.jobs.megatron_kernels import set_workspace
from spbench.bench.tools.jobs.megatron_model import layers_of
from spbench.impls import LARGEST_OF

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
#: passes over gradients, and switches of data parallelism
_PASSES = "--no-check-for-nan-in-loss-and-grad", "--clip-grad"
_SHARDS, _OVERLAPS = "--use-distributed-optimizer", ("--overlap-grad-reduce", "--overlap-param-gather")
_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_LAYOUT = "--pipeline-model-parallel-layout"
#: of a layout: what it may say, (...)*n and x*n, and how often it may be repeated
_LAYOUT_TEXT, _REPEATED = re.compile(r"[EtmL|()*\d]+"), (r"\(([^()]+)\)\*(\d{1,3})", r"([EtmL|])\*(\d{1,3})")


def set_schedule(a: Account) -> None:
    """Set how the pipeline runs."""
    stages, layers = a.value("--pipeline-model-parallel-size") or 1, layers_of(a) or 0
    each, virtual = _CHUNKS
    counted = layers + a.has(_PIPELINE_SPLITS[2]) + a.has(_PIPELINE_SPLITS[3])
    chunks, name = a.value(virtual) or 1, virtual
    if (layout := a.value(_LAYOUT)) is not None:
        sizes = _layers_by_layout(a, layout, stages, layers)
        if sizes is None:
            return
        if len({*sizes}) > 1:
            a.set("training.stage_layers", sizes, _LAYOUT)
        chunks, name = len(sizes) // stages, _LAYOUT
        a.ignore("the stages have as many layers anyway", _LAYOUT)
        _set_interleaving(a, stages, chunks, name)
        return
    if pattern_of(a):
        _set_hybrid_stages(a, stages)
        return
    if (of_each := a.value(each)) is not None:
        name = each
        if a.has(virtual):
            a.problems.append(f"{each} and {virtual} are both given; leave one")
        if of_each < 1 or counted % (stages * of_each):
            a.problems.append(f"--num-layers {layers} is no multiple of {stages} stages x {a.spelled(each)}")
            return
        chunks = counted // (stages * of_each)
    if chunks > 1 and stages == 1:
        a.problems.append(f"{a.spelled(name)} needs --pipeline-model-parallel-size of 2 or more")
    parts = stages * max(1, chunks)
    if parts > 1 and parts > min(counted, LARGEST_OF["layers"]):
        a.problems.append(f"{counted} layers are fewer than {parts} stages or parts of these")
        return
    _set_stages(a, layers, stages, max(1, chunks))
    _set_interleaving(a, stages, max(1, chunks), name)


def _set_hybrid_stages(a: Account, stages: int) -> None:
    """Set the stages that the bars of a hybrid's pattern make."""
    for name in (*_CHUNKS, *_PIPELINE_SPLITS):
        a.refuse_given("stages of a hybrid that its pattern does not say: not modelled", name)
    if sizes := stages_of(a, stages):
        if len({*sizes}) > 1:
            a.set("training.stage_layers", [*sizes], "--hybrid-layer-pattern", "--hybrid-override-pattern")
        _set_interleaving(a, stages, len(sizes) // stages, "--hybrid-layer-pattern")


def _set_interleaving(a: Account, stages: int, chunks: int, name: str) -> None:
    """Set the interleaved schedule of several chunks, which the argument ``name`` says."""
    early, group, waits = _INTERLEAVED
    if chunks == 1:
        a.ignore("a rank has one run of layers", *_CHUNKS, *_INTERLEAVED)
        return
    a.set("training.schedule", "interleaved", name)
    a.set("training.virtual_stages", chunks, name)
    a.map(waits)
    if a.has(waits) and stages < 3:
        a.problems.append(f"{waits} with virtual stages needs --pipeline-model-parallel-size of 3 or more")
    a.map_given(group)
    a.leave("time", "transfers of the warm-up and of the flush run beside computation, below the peak", early)


def _set_stages(a: Account, layers: int, stages: int, chunks: int) -> None:
    """Set how many layers each stage has, as get_num_layers_to_build of Megatron-Core does."""
    first, last = (a.value(name) for name in _PIPELINE_SPLITS[:2])
    embedding, loss = (a.has(name) for name in _PIPELINE_SPLITS[2:])
    if stages == 1:
        a.ignore("there is one stage", *_PIPELINE_SPLITS)
        return
    if (embedding or loss) and (first is not None or last is not None):
        a.problems.append(f"{_PIPELINE_SPLITS[2 if embedding else 3]} and a number of layers are both given")
        return
    between = [*range(first is not None, stages - (last is not None))]
    left = layers + embedding + loss - (first or 0) - (last or 0)
    if left < 0 or (left % len(between) if between else left):
        a.problems.append(f"{left} layers cannot be split evenly over {len(between)} stages")
        return
    of_rank = [left // len(between) if between else 0] * stages
    for rank, given in ((0, first), (stages - 1, last)):
        of_rank[rank] = of_rank[rank] if given is None else given
    if any(n % chunks for n in of_rank):
        a.problems.append(f"stages of {of_rank} layers cannot be split into {chunks} parts each")
        return
    sizes = [n // chunks for n in of_rank] * chunks
    sizes[0] -= embedding
    sizes[-1] -= loss
    if len({*sizes}) > 1:
        a.set("training.stage_layers", sizes, *_PIPELINE_SPLITS)
    else:
        a.ignore("the stages have as many layers anyway", *_PIPELINE_SPLITS)


def _layers_by_layout(a: Account, layout: str, stages: int, layers: int) -> list[int] | None:
    """Layers of the stages that a layout lists, as PipelineParallelLayerLayout of Megatron-Core reads it;
    None where it is none, which is a problem then."""
    others = [name for name in (*_CHUNKS, *_PIPELINE_SPLITS) if a.has(name)]
    if others:
        a.problems.append(f"{_LAYOUT} and {others[0]} are both given; leave one")
        return None
    text = layout.replace(",", "")
    for pattern in _REPEATED if _LAYOUT_TEXT.fullmatch(text) else ():
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    parts = text.split("|")
    if not re.fullmatch(r"E[t|]*L", text.replace("m", "")):
        a.problems.append(f"{_LAYOUT} {layout!r} is no E, then t and | for layers and stages, then L")
    elif "m" in text and not re.fullmatch(r"[^m]*m+L", parts[-1]):
        a.refuse_given("layers that predict further tokens (m) before the end of the last stage", _LAYOUT)
    elif text.count("m") != (a.value("--mtp-num-layers") or 0):
        a.problems.append(f"{_LAYOUT} has {text.count('m')} m, not as many as --mtp-num-layers")
    elif len(parts) % stages or (stages == 1 and len(parts) > 1) or len(parts) > LARGEST_OF["layers"]:
        a.problems.append(
            f"{_LAYOUT} has {len(parts)} stages, which --pipeline-model-parallel-size {stages} cannot have"
        )
    elif text.count("t") != layers:
        a.problems.append(f"{_LAYOUT} has {text.count('t')} layers, not --num-layers {layers}")
    else:
        return [part.count("t") for part in parts]
    a.ignore("it is not right", _LAYOUT)
    return None


def set_optimizer(a: Account, cluster: str | None) -> None:
    """Set data parallelism and the optimizer."""
    muon = set_muon(a)
    sharded, late = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"
    if a.has(sharded):
        if muon:
            a.problems.append(f"Muon has no {sharded}")
        _set_sharding(a, sharded, late)
        _set_moments(a, cluster)
        return
    a.ignore(f"without {sharded} there is none", late)
    a.set("training.backend", "megatron", note="DistributedDataParallel and optimizer of Megatron-Core")
    a.map_given(_SHARDS, *_OVERLAPS)
    _set_alignment(a)
    early = "--overlap-param-gather-with-optimizer-step"
    reduces, gathers = _OVERLAPS
    for name, needed in ((gathers, _SHARDS), (gathers, reduces), (early, gathers)):
        if a.has(name) and not a.has(needed):
            a.problems.append(f"{name} needs {needed}")
    if a.has(early):
        a.remarks.append(f"{early}: the first all-gather starts after all of the optimizer's step")
        a.leave("time", "an all-gather of the same buffers starts earlier", early)
    _set_offloading(a)
    a.map("--no-gradient-accumulation-fusion")
    _set_passes(a)
    _set_main_gradients(a)
    a.map_given("--ddp-bucket-size", "--ddp-pad-buckets-for-high-nccl-busbw")
    instances = "--num-distributed-optimizer-instances"
    if a.value(instances) != 1:
        a.map(instances)
    a.refuse_given("a gradient of the embedding's weights that is put off", "--defer-embedding-wgrad-compute")
    a.ignore("of --defer-embedding-wgrad-compute", "--wgrad-deferral-limit")
    _set_moments(a, cluster)


def _set_passes(a: Account) -> None:
    """Set the passes over gradients: the check for NaN, and clipping."""
    checked, clipped = _PASSES
    a.map_given(checked)
    if a.value(clipped) == 1:
        a.took("gradients are clipped to this norm by default", clipped)
    else:
        a.map(clipped)


def _set_sharding(a: Account, sharded: str, late: str) -> None:
    """Set FSDP2, whose switch and that of its ZeRO-2 are given."""
    backend = "zero2" if a.has(late) else "zero3"
    a.set("training.backend", backend, sharded, late)
    a.remarks.append(f"{sharded} is taken for {backend}, FSDP2 by layer")
    untied, fusion = "--untie-embeddings-and-output-weights", "--no-gradient-accumulation-fusion"
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    needs = {
        untied: a.has(untied),
        fusion: a.has(fusion),
        "no --fp16": not a.has("--fp16"),
        "--pipeline-model-parallel-size 1": a.value("--pipeline-model-parallel-size") == 1,
        f"no {_SHARDS}": not a.has(_SHARDS),
        f"no {queues}=1": a.environment.get(queues) != "1",
    }
    a.problems += [f"{sharded} needs {needed}" for needed, there in needs.items() if not there]
    a.ignore(f"{sharded} reduces and gathers by itself", _SHARDS, *_OVERLAPS, "--ddp-bucket-size")
    a.ignore(f"{sharded} has no main gradients", fusion)
    a.leave("time", "gradients are neither clipped nor checked with FSDP2", *_PASSES)
    a.refuse_given("FSDP2 with Megatron-LM's optimizer on the host", "--optimizer-cpu-offload")


def _set_alignment(a: Account) -> None:
    """Set when the stages of a pipeline begin to gather weights, which one run of layers a rank does not say:
    there each stage begins as it needs them, aligned or not."""
    apart = "--no-align-param-gather"
    chunks = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
    if not a.has("--overlap-param-gather"):
        a.ignore("weights are gathered at once, after the optimizer's step", apart)
    elif not any(map(a.has, (*chunks, "--pipeline-model-parallel-layout"))):
        a.ignore("so it is where a rank has one run of layers", apart)
    else:
        a.map_given(apart)


def _set_offloading(a: Account) -> None:
    """Set the optimizer's place, for which Megatron-LM has the path of its precision-aware optimizer."""
    aware, torchs = "--use-precision-aware-optimizer", "--use-torch-optimizer-for-cpu-offload"
    offloaded, overlapped = "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"
    share = "--optimizer-offload-fraction"
    if a.has(aware) and a.has("--bf16") and not a.has(offloaded):
        # store_param_remainders of core/optimizer/optimizer_config.py is on (distrib_optimizer.py, line 1008)
        because = "main weights are counted in float32, 2 bytes a weight, over the replicas, more than theirs"
        a.stand_in("main weights as what bfloat16 lacks of float32, 16 bits", "memory", because, aware)
    a.ignore("main weights, gradients and moments are float32 as without it", aware)
    if not a.has(offloaded):
        a.ignore(f"of {offloaded}", overlapped, torchs, share)
        return
    a.problems += [f"{offloaded} needs {name}" for name in (aware, _SHARDS) if not a.has(name)]
    fraction = a.value(share)
    if fraction == 0:
        a.took("no state is on the host", offloaded, share, overlapped)
        return
    a.map(offloaded, overlapped)
    if not 0 < fraction <= 1:
        a.problems.append(f"{a.spelled(share)} is no share from 0 to 1")
    if fraction != 1:
        a.map(share)


def _set_main_gradients(a: Account) -> None:
    single, half = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
    main = "--main-grads-dtype"
    a.ignore("--bf16 is not given", *([] if a.has("--bf16") else [main]))
    if a.has("--bf16"):
        a.ignore("is so with --bf16", single)
        narrow = a.value(main) == "bf16"
        if narrow and not a.has("--use-precision-aware-optimizer"):
            a.problems.append(f"{a.spelled(main)} needs --use-precision-aware-optimizer")
        if a.has(half) or narrow:
            names = (half,) if a.has(half) else (main,)
            a.set("training.accumulate_allreduce_grads_in_fp32", False, *names)
        if narrow:
            a.remarks.append(f"{a.spelled(main)}: the optimizer's step makes float32 copies of gradients")
    elif a.has("--fp16"):
        a.ignore("--bf16 is not given", half)
        a.set("training.accumulate_allreduce_grads_in_fp32", a.has(single), single)
    else:
        a.ignore("all is in float32", single, half)


def _set_moment_dtypes(a: Account) -> None:
    """Set the dtype of Adam's moments, which the precision-aware optimizer alone takes."""
    names, aware = ("--exp-avg-dtype", "--exp-avg-sq-dtype"), "--use-precision-aware-optimizer"
    dtypes = {a.value(name) for name in names}
    if dtypes != {"fp32"} and not a.has(aware):
        a.problems += [f"{a.spelled(name)} needs {aware}" for name in names if a.value(name) != "fp32"]
    if dtypes == {"bf16"} and a.has("--bf16") and not a.has("--optimizer-cpu-offload"):
        a.set("training.exp_avg_dtype", "bf16", *names)
    elif dtypes != {"fp32"}:
        because = (
            "both are counted in float32, 2 bytes a weight more than in half precision, over the replicas"
        )
        a.stand_in(
            "moments of other precisions than both float32 or bf16", "time and memory", because, *names
        )
    a.ignore("float32, as without it", *names)


def _set_moments(a: Account, cluster: str | None) -> None:
    _set_moment_dtypes(a)
    set_workspace(a, cluster)
    if a.has("--fp16"):
        a.ignore("gradients are checked for overflow with a fixed scale too", "--loss-scale")
    micro, of_evaluation = a.value("--micro-batch-size") or 1, "--eval-micro-batch-size"
    if (a.value(of_evaluation) or 0) <= micro:
        a.ignore("evaluation holds no more than a step of training", of_evaluation)
    if a.has("--deterministic-mode"):
        a.remarks.append("kernels of --deterministic-mode are slower, which is not modelled")
        a.took("see what is approximate", "--deterministic-mode")
    a.first_steps(one=a.value("--train-iters") == 1)


def set_userbuffers(a: Account) -> None:
    """Set TransformerEngine's workspaces for collectives in parts beside matmuls; these need sequence
    parallelism."""
    switch = "--tp-comm-overlap"
    kinds = (
        *("--no-tp-comm-bulk-wgrad", "--no-tp-comm-bulk-dgrad", "--no-tp-comm-overlap-ag"),
        *("--no-tp-comm-overlap-rs", "--tp-comm-overlap-rs-dgrad", "--no-tp-comm-split-ag"),
        *("--no-tp-comm-split-rs", "--tp-comm-overlap-cfg"),
    )
    several = (a.value("--tensor-model-parallel-size") or 1) > 1 and a.has("--sequence-parallel")
    if not a.has(switch) or not several:
        a.ignore("of --tp-comm-overlap, which needs --sequence-parallel and several ranks", switch, *kinds)
        return
    a.add("strategy_options.userbuffers", True, a.spelled(switch))
    because = "collectives are waited for, and buffers outside torch's allocator are not counted"
    a.leave("memory and time", because, switch, *kinds)
