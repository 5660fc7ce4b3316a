"""Pipelines of torchtitan: which layers its stages have, and in which order they run micro-batches
(torchtitan/distributed/pipeline_parallel.py at 0.2.2 and at b5bcd76c, distributed/pipeline.py at 0.1.0, and
parallelisms/pipelining_utils.py at 3f20451b); and matmuls in eight bits, which torchao makes of linear
layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.torchtitan_models import TorchtitanModel

_SECTION = "parallelism.pipeline_parallel_"
#: by torch's name of a schedule: ours
SCHEDULES: Mapping[str, str] = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
_PER_STAGE = f"{_SECTION}layers_per_stage"
LESS = (f"{_SECTION}first_stage_less_layers", f"{_SECTION}last_stage_less_layers")
#: by version: how many micro-batches there are
_NUMBERS = {"a": "experimental.pipeline_parallel_microbatches", "d": "parallelism.num_pp_microbatches"}
_SIZE = f"{_SECTION}microbatch_size"
#: the last words of keys
_SCHEDULE, _POINTS = "pipeline_parallel_schedule", "pipeline_parallel_split_points"
_ELSEWHERE = ("pipeline_parallel_schedule_csv", "module_fqns_per_model_part")
_OTHERS = (_SIZE, *_NUMBERS.values(), *LESS, _PER_STAGE)


def stage_layers(layers: int, stages: int, first: int, last: int) -> list[int]:
    """How many layers each stage has where the embedding counts as ``first`` of them, norm and output as
    ``last``; empty where there are too few."""
    each, more = divmod(layers + first + last, stages)
    if max(first, last, 1) > each:
        return []
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return sizes


def first_stage_layers(layers: int, stages: int) -> list[int]:
    """How many layers each stage has in December 2024, where stages after the first take one more until what
    is left is the last's."""
    each, more = divmod(layers, stages)
    sizes = [each, *(each + (stage < more) for stage in range(stages - 2))]
    return [*sizes, layers - sum(sizes)] if each and stages > 1 else []


def split_layers(points: list[str] | str, layers: int) -> list[int]:
    """How many layers each stage has of which all but the first begin at these; empty: they cannot."""
    names = points.split(",") if isinstance(points, str) else points
    begins = [0, *(int(digits) if (digits := name.rpartition(".")[2]).isdecimal() else -1 for name in names)]
    sizes = [after - before for before, after in zip(begins, [*begins[1:], layers], strict=True)]
    return sizes if min(sizes) > 0 else []


def set_pipeline(job: TorchtitanModel, ranks: int, ranks_name: str) -> None:
    """Set the schedule of a pipeline over ``ranks``, and the layers of its stages."""
    k = job.keys
    last_words = (_SCHEDULE, _POINTS, *_ELSEWHERE)
    keys = [name for name in k.program_arguments if name.rpartition(".")[2] in last_words or name in _OTHERS]
    if ranks == 1:
        k.ignore("of pipelines, which the job has not", *keys)
        return
    schedule_name = job.named(_SCHEDULE)
    name = str(k.value(schedule_name))
    schedule = {theirs.lower(): ours for theirs, ours in SCHEDULES.items()}.get(name.lower())
    for elsewhere in keys:
        if elsewhere.rpartition(".")[2] in _ELSEWHERE and k.value(elsewhere):
            k.refuse("stages or a schedule that are written out", elsewhere)
    if schedule is None:
        k.refuse(f"another schedule than {', '.join(SCHEDULES)}", schedule_name)
        return
    sizes, names, note = _stages(job, ranks, several=schedule == "interleaved")
    stages = len(sizes)
    if not sizes:
        return
    if stages % ranks or (stages == ranks) != (schedule != "interleaved"):
        words = " and ".join(map(k.spelled, filter(k.has, names))) or schedule_name
        k.problems.append(f"{words} makes {stages} stages, which {name} cannot run on {ranks}")
        return
    k.set("training.schedule", schedule, schedule_name)
    if stages > ranks:
        k.set("training.virtual_stages", stages // ranks, schedule_name, *names)
        # torch.distributed.pipelining starts its sends and goes on
        k.set("training.overlap_p2p_communication", True, schedule_name, note="sends are waited for late")
    if len({*sizes}) > 1:
        k.set("training.stage_layers", sizes, *names, note=note)
    k.took(f"{stages} stages", *keys)


def _stages(job: TorchtitanModel, ranks: int, *, several: bool) -> tuple[list[int], list[str], str]:
    """The layers of each stage, the keys that say so, and in which way; none, and a problem, where they are
    too few. ``several``: a rank has more than one stage."""
    k, layers = job.keys, int(getattr(job.preset, "layers", 0))
    points = next((name for name in k.program_arguments if name.rpartition(".")[2] == _POINTS), "")
    stages, ends, names = ranks * (1 + several), (0, 0), [points]
    if points and (given := k.value(points)):
        sizes, note = split_layers(given, layers), ""
    elif job.version == "a":
        sizes, note, names = first_stage_layers(layers, stages), "the middle stages have one more", []
    else:
        first, last = (int(job.value(less, 1) or 0) for less in LESS)
        ends = first, last
        if (each := k.value(_PER_STAGE)) is not None:
            stages = -(-(layers + sum(ends)) // max(1, each))
        sizes, note = (
            stage_layers(layers, stages, *ends),
            "the embedding, and norm and output, count as layers",
        )
        names = [name for name in (*LESS, _PER_STAGE) if name in k.given]
    if not sizes:
        which = f", {ends[0]} and {ends[1]} for the ends," if any(ends) else ""
        k.problems.append(
            f"{layers} layers{which} are too few for {stages} stages, or a split point names no layer"
        )
    return sizes, names, note


def micro_batches(job: TorchtitanModel, local: int) -> tuple[int, str]:
    """How many micro-batches a pipeline runs at once of ``local`` samples of a rank, and the key that says
    it; 1 with a problem where that does not divide them."""
    k = job.keys
    name = _NUMBERS.get(job.version, _SIZE)
    if job.version == "d":
        return k.count(name), name
    divisor = job.stages if k.value(name) is None else k.count(name)
    if local % divisor:
        batch = "batch_size" if job.version == "a" else "local_batch_size"
        k.problems.append(f"training.{batch} {local} is no multiple of {name} {divisor}")
        return 1, name
    return divisor if job.version == "a" else local // divisor, name


#: converters that make linear layers multiply in eight bits, by their names in the versions
_LINEAR = ("float8", "quantize.linear.float8")
_SWITCH, _CONVERTERS = "float8.enable_float8_linear", "model.converters"
_SECTIONS = ("quantize.linear.float8", "float8")
#: which torchtitan reads where layers are converted
_KEYS = (
    *("recipe_name", "filter_fqns", "enable_fsdp_float8_all_gather"),
    *("precompute_float8_dynamic_scale_for_fsdp", "scaling_type_input", "scaling_type_weight"),
    "scaling_type_grad_output",
)


def set_fp8(k: Account, *, experts: bool) -> None:
    """Set the recipe of matmuls in eight bits, if a job has them; refuse other converters.

    Args:
        experts: the model has some, beside which no layer is in eight bits here.
    """
    keys = _keys(k)
    if _SWITCH in k.program_arguments:
        converted, switch = k.value(_SWITCH), _SWITCH
    else:
        converted, switch = k.value(_CONVERTERS), _CONVERTERS
        if [each for each in converted if each not in _LINEAR]:
            k.refuse("what converters make of layers (matmuls in eight bits of another kind)", switch)
            return
    if not converted:
        k.ignore("no layer is converted to matmuls in eight bits", *keys.values())
        return
    if experts:
        because = "all matmuls are in sixteen bits, which take up to twice as long"
        k.stand_in(
            "linear layers in eight bits beside experts in torchao", "time and memory", because, switch
        )
        k.ignore("no layer is in eight bits", *keys.values())
        return
    recipe = keys.get("recipe_name")
    name = (k.value(recipe) if recipe else None) or "tensorwise"
    k.set("model_options.fp8", name, switch, *([recipe] if recipe else []))
    for each in filter(k.has, (name for key, name in keys.items() if key.startswith("scaling_type"))):
        if k.value(each) == "delayed":
            k.refuse("scales from earlier steps in torchao", each)
        k.took("scales of the tensor itself", each)
    _leave(k, keys)


def _keys(k: Account) -> dict[str, str]:
    """The keys of a job's version, by their last part."""
    names = ((key, f"{section}.{key}") for section in _SECTIONS for key in _KEYS)
    return {key: name for key, name in names if name in k.program_arguments}


def _leave(k: Account, keys: dict[str, str]) -> None:
    """Say what is not modelled of them."""
    if (filtered := keys.get("filter_fqns")) is not None:
        if k.value(filtered) == ["output"]:
            k.took("the head stays as it is", filtered)
        else:
            because = "each projection of a layer is in eight bits, and the head is not"
            k.stand_in("a choice of layers for eight bits", "time", because, filtered)
    gathered = keys["enable_fsdp_float8_all_gather"]
    if k.value(gathered):
        k.leave("time and memory", "weights are gathered in sixteen bits and cast then", gathered)
    k.ignore("each cast of a weight computes its scale", keys["precompute_float8_dynamic_scale_for_fsdp"])
