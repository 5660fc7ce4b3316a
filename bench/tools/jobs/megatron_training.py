"""The pipeline of a Megatron-LM job, from the arguments."""

from __future__ import annotations

import re

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_layers import pattern_of, stages_of
from spbench.bench.tools.jobs.megatron_model import layers_of
from spbench.bench.tools.jobs.rules import call
from spbench.impls import LARGEST_OF

_PIPELINE_SPLITS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
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
    a.facts |= {"stages": stages, "chunks": chunks, "chunked_by": name}
    call(a, "interleaving")


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
