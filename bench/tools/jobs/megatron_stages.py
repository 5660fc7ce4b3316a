"""The pipeline of a Megatron-LM job: its schedule, and the layers of its stages, from the arguments."""

from __future__ import annotations

import re

from spbench.bench.tools.jobs.megatron_model import layers_of
from spbench.bench.tools.jobs.megatron_translation import Translation
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
_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_LAYOUT = "--pipeline-model-parallel-layout"
#: of a layout: what it may say, (...)*n and x*n, and how often it may be repeated
_LAYOUT_TEXT, _REPEATED = re.compile(r"[EtmL|()*\d]+"), (r"\(([^()]+)\)\*(\d{1,3})", r"([EtmL|])\*(\d{1,3})")


def set_schedule(t: Translation) -> None:
    """Set how the pipeline runs."""
    g = t.given
    stages, layers = g.number("--pipeline-model-parallel-size") or 1, layers_of(t) or 0
    each, virtual = _CHUNKS
    counted = layers + g.on(_PIPELINE_SPLITS[2]) + g.on(_PIPELINE_SPLITS[3])
    chunks, name = g.number(virtual) or 1, virtual
    if (layout := g.text(_LAYOUT)) is not None:
        sizes = _layers_by_layout(t, layout, stages, layers)
        if sizes is None:
            return
        if len({*sizes}) > 1:
            t.set("training.stage_layers", sizes, _LAYOUT)
        chunks, name = len(sizes) // stages, _LAYOUT
        t.ignore("the stages have as many layers anyway", _LAYOUT)
        _set_interleaving(t, stages, chunks, name)
        return
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
    _set_interleaving(t, stages, max(1, chunks), name)


def _set_interleaving(t: Translation, stages: int, chunks: int, name: str) -> None:
    """Set the interleaved schedule of several chunks, which the argument ``name`` says."""
    g = t.given
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
        moved = "transfers of the warm-up and of the flush run beside computation, below the peak"
        t.leave("time", moved, "--overlap-p2p-communication-warmup-flush")
        return
    t.ignore("a rank has one run of layers", *_CHUNKS, *_INTERLEAVED)


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


def _layers_by_layout(t: Translation, layout: str, stages: int, layers: int) -> list[int] | None:
    """Layers of the stages that a layout lists, as PipelineParallelLayerLayout of Megatron-Core reads it;
    None where it is none, which is a problem then."""
    others = [name for name in (*_CHUNKS, *_PIPELINE_SPLITS) if t.given.on(name)]
    if others:
        t.problems.append(f"{_LAYOUT} and {others[0]} are both given; leave one")
        return None
    text = layout.replace(",", "")
    for pattern in _REPEATED if _LAYOUT_TEXT.fullmatch(text) else ():
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    found = text.split("|")
    if not re.fullmatch(r"E[t|]*L", text.replace("m", "")):
        t.problems.append(f"{_LAYOUT} {layout!r} is no E, then t and | for layers and stages, then L")
    elif "m" in text:
        t.refuse("layers that predict several tokens (m)", _LAYOUT)
    elif len(found) % stages or (stages == 1 and len(found) > 1) or len(found) > LARGEST_OF["layers"]:
        t.problems.append(
            f"{_LAYOUT} has {len(found)} stages, which --pipeline-model-parallel-size {stages} cannot have"
        )
    elif text.count("t") != layers:
        t.problems.append(f"{_LAYOUT} has {text.count('t')} layers, not --num-layers {layers}")
    else:
        return [part.count("t") for part in found]
    t.ignore("it is not right", _LAYOUT)
    return None
