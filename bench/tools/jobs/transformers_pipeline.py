"""The pipeline of a transformers job: the layers of its stages, and the micro-batches that they run, as NeMo
Automodel has them (commit 36044ad3: components/distributed/pipelining/functional.py), by
torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.transformers_step import TransformersStep

#: by torch's name of a schedule, without its hyphens and lines: ours
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}


def layers_of(stages: int, layers: int) -> list[int]:
    """How many layers each stage has: the first have one more than the last."""
    each, more = divmod(layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def stages_of(layers: int, each: int | None, ranks: int, several: bool, rounded: str) -> int:
    """How many stages of ``each`` layers a pipeline has; ``several``: a rank has more than one."""
    if each is None:
        return ranks * (1 + several)
    stages = -(-layers // max(1, each))
    if rounded == "down":
        return stages - stages % ranks
    return stages + -stages % ranks if rounded == "up" else stages


def set_pipeline(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> None:
    """Set the schedule of a pipeline and the layers of its stages; ``fields`` are of the config.json."""
    ranks, names = step.pipeline.value, step.pipeline.names
    of_pipelines = (step.schedule, step.stage_layers, step.rounded, step.piece)
    if ranks == 1:
        idle = [name for each in of_pipelines for name in each.names]
        k.ignore("of pipelines, which the job has not", *idle, *names)
        return
    schedule = SCHEDULES.get(str(step.schedule.value).lower().replace("_", ""))
    layers = fields.get("num_hidden_layers")
    k.set("sizes.pp", ranks, *names)
    if schedule is None:
        k.refuse(f"another schedule of a pipeline than {', '.join(SCHEDULES)}", *step.schedule.names)
        return
    if not isinstance(layers, int):
        return  # of a model that is not known
    several = schedule == "interleaved"
    stages = stages_of(layers, step.stage_layers.value, ranks, several, str(step.rounded.value))
    if stages % ranks or (stages > ranks) != several or not ranks <= stages <= layers:
        have = f"{layers} layers in {stages} stages"
        k.problems.append(f"{have} are no pipeline of {ranks} ranks by {step.schedule.value}")
        return
    k.set("training.schedule", schedule, *step.schedule.names)
    if several:
        k.set("training.virtual_stages", stages // ranks, *step.stage_layers.names, *step.rounded.names)
        # torch.distributed.pipelining starts its sends and goes on
        k.set(
            "training.overlap_p2p_communication", True, *step.schedule.names, note="sends are waited for late"
        )
    if len({*(sizes := layers_of(stages, layers))}) > 1:
        k.set("training.stage_layers", sizes, *step.stage_layers.names, note="the first stages have one more")
    k.took(f"{stages} stages", *step.stage_layers.names, *step.rounded.names)


def set_pieces(k: Account, step: TransformersStep, runs: int, names: Sequence[str]) -> None:
    """Set the micro-batches of a step: those of ``runs`` whose gradients are added up, of which each is cut
    in pieces where there is a pipeline."""
    local, piece, ranks = step.micro_batch.value, step.piece.value, step.pipeline.value
    if ranks == 1:
        if runs > 1:
            k.set("training.micro_batches", runs, *names)
        if runs > 1 and step.deferred.value and str(step.sharding.value).startswith("fsdp"):
            note = "gradients are whole, in the dtype of the sum, until the last micro-batch"
            k.set("training.reduce_at", step.deferred.value, *step.deferred.names, note=note)
        k.ignore("each step has one micro-batch, or a pipeline", *step.deferred.names)
        return
    k.took("a pipeline sums gradients once", *step.deferred.names)
    if type(piece) is not int or piece < 1 or local % piece:
        k.problems.append(f"a batch of {local} is no multiple of a pipeline's micro-batch of {piece}")
        return
    pieces = local // piece
    k.set("training.micro_batches", pieces * runs, *step.micro_batch.names, *step.piece.names, *names)
    if runs > 1:
        because = (
            f"one pipeline of {pieces * runs} micro-batches stands for {runs} of {pieces}: a step lacks the "
            f"bubbles of {runs - 1}"
        )
        k.stand_in("a pipeline that runs several times a step", "time", because, *names)
