"""Pipelines of torchtitan: which layers its stages have, and in which order they run micro-batches
(torchtitan/distributed/pipeline_parallel.py at 0.2.2 and at b5bcd76c)."""

from __future__ import annotations

from collections.abc import Mapping

from spbench.bench.tools.jobs.torchtitan_models import TorchtitanModel

_SECTION = "parallelism.pipeline_parallel_"
#: by torch's name of a schedule: ours
SCHEDULES: Mapping[str, str] = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
_SCHEDULE, _PER_STAGE = f"{_SECTION}schedule", f"{_SECTION}layers_per_stage"
LESS = (f"{_SECTION}first_stage_less_layers", f"{_SECTION}last_stage_less_layers")
_ELSEWHERE = (f"{_SECTION}schedule_csv", "parallelism.module_fqns_per_model_part")
_SIZE, _NUMBER = f"{_SECTION}microbatch_size", "parallelism.num_pp_microbatches"
#: all keys of pipelines, but for how many stages there are
_KEYS = (_SCHEDULE, _PER_STAGE, *LESS, *_ELSEWHERE, _SIZE, _NUMBER)


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


def set_pipeline(job: TorchtitanModel, ranks: int, ranks_name: str) -> None:
    """Set the schedule of a pipeline over ``ranks``, and the layers of its stages."""
    k = job.keys
    if ranks == 1:
        k.ignore("of pipelines, which the job has not", *_KEYS)
        return
    if not job.recent:
        k.refuse("a pipeline of this version", ranks_name)
        return
    name, layers = str(k.value(_SCHEDULE)), int(getattr(job.preset, "layers", 0))
    schedule = {theirs.lower(): ours for theirs, ours in SCHEDULES.items()}.get(name.lower())
    for elsewhere in _ELSEWHERE:
        if k.value(elsewhere):
            k.refuse("stages or a schedule that are written out", elsewhere)
    if schedule is None:
        k.refuse(f"another schedule than {', '.join(SCHEDULES)}", _SCHEDULE)
        return
    first, last = (int(k.value(less) or 0) for less in LESS)
    stages = ranks * (1 if schedule != "interleaved" else 2)
    if (each := k.value(_PER_STAGE)) is not None:
        stages = -(-(layers + first + last) // max(1, each))
        wrong = stages % ranks or (stages == ranks) != (schedule != "interleaved")
        if wrong:
            k.problems.append(
                f"{_PER_STAGE} {each} makes {stages} stages, which {name} cannot run on {ranks}"
            )
            return
    sizes = stage_layers(layers, stages, first, last)
    if not sizes:
        k.problems.append(
            f"{layers} layers, {first} and {last} for the ends, are too few for {stages} stages"
        )
        return
    k.set("training.schedule", schedule, _SCHEDULE)
    if stages > ranks:
        k.set("training.virtual_stages", stages // ranks, _SCHEDULE, _PER_STAGE)
        # torch.distributed.pipelining starts its sends and goes on
        k.set("training.overlap_p2p_communication", True, _SCHEDULE, note="sends are waited for late")
    k.took(f"{stages} stages", _PER_STAGE)
    if len({*sizes}) > 1:
        note = "the embedding, and norm and output, count as layers"
        k.set("training.stage_layers", sizes, *LESS, note=note)
    k.took("layers of the stages", *LESS)


def micro_batches(job: TorchtitanModel, local: int) -> tuple[int, str]:
    """How many micro-batches a pipeline runs at once of ``local`` samples of a rank, and the key that says
    it; 1 with a problem where that does not divide them."""
    k = job.keys
    if not job.recent:
        return 1, ""  # refused before
    if job.version == "d":
        return k.count(_NUMBER), _NUMBER
    size = k.count(_SIZE)
    if local % size:
        k.problems.append(f"training.local_batch_size {local} is no multiple of {_SIZE} {size}")
        return 1, _SIZE
    return local // size, _SIZE
