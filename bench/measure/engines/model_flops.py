"""The FLOPs of a model: what it multiplies and adds on a single device, whatever divides it among ranks.

They are counted on fake tensors, from the model's own code: of one sequence and of few layers, as FLOPs are
linear in both. What backward computes again, what several ranks compute alike, and what is padded for ranks
are no FLOPs of the model; of a causal mask, a window and packed documents only what they leave is counted.
Linear attention and recurrences are counted as the single device computes them, in chunks.
"""

from __future__ import annotations

import json
from functools import lru_cache

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import Precision
from spbench.bench.measure.engines.deep_models import with_layers
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.unlike_ranks import work_error
from spbench.bench.measure.simulator.step_parts import Flops, flops_of
from spbench.impls import loose_files
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.nesting import nesting

#: FLOPs of a step of those of its forward: backward has two products for each
_OF_FORWARD = {"training": 3, "inference": 1}
#: options of models that cut the same products into pieces, which a single device would trace one by one
_PIECES = ("mlp_tile", "loss_tile")
#: what sums of that many numbers can be off by
_ROUNDING = 1e-9


def model_flops(cell: Cell) -> float:
    """FLOPs of a step of the cell's model, for the whole batch."""
    return _OF_FORWARD[cell.training.step] * forward_flops(cell).forward


def forward_flops(cell: Cell) -> Flops:
    """FLOPs of the forward of the cell's model, for the whole batch."""
    batch, seq_len = cell.shape
    return _of_a_sequence(json.dumps(cell.model_arguments), cell.precision, seq_len).times(batch)


@lru_cache(maxsize=256)
def _of_a_sequence(model: str, precision: Precision, seq_len: int) -> Flops:
    name, options, config = json.loads(model)
    options = {option: value for option, value in options.items() if option not in _PIECES}
    alone = {"strategy": "single", "batch": 1, "seq_len": seq_len, "training": {"step": "inference"}}
    of_model = {"model": name, "model_options": options, "model_config_json": config}
    cell = Cell.model_validate({**alone, **of_model, "precision": precision})
    made = model_preset(*cell.model_arguments)
    layers = getattr(made, "layers", 0)
    if layers <= 2 * made.period or layers % made.period:
        return _forward(cell)
    one, two = (_forward(with_layers(cell, n * made.period)) for n in (1, 2))
    return one.plus(two.plus(one.times(-1)).times(layers // made.period - 1))


def _forward(cell: Cell) -> Flops:
    program = trace(cell, events=True).program
    assert program is not None
    return flops_of(program)


def checked_flops(cell: Cell, metered: Flops) -> tuple[dict[str, float], str]:
    """:attr:`Measurement.flops`, and in words where the work of the ranks together is not that of the model;
    "" where it is.

    Causal softmax attention is work that ranks only share out: together they have the model's, but for heads
    that are padded, the diagonals of stripes, and sets of ranks of which one stands for others of much the
    same work. All products together are at least the model's. This is not said of linear attention. A
    strategy of users may have more, as one that multiplies what a mask hides.

    Args:
        metered: of all ranks.
    """
    model = forward_flops(cell)
    found = {"model": model_flops(cell), "forward": metered.forward, "all": metered.all}
    _, length = cell.shape
    kinds = {site.kind for site in model_preset(*cell.model_arguments).sites(1, length)}
    if kinds & {"linear_attention", "gated_recurrence"}:
        return found, ""  # cut into other chunks where ranks have fewer positions
    allowed = _ROUNDING + (work_error(cell) or 0.0)
    if cell.strategy_options.get("placement") == "striped":
        allowed += cell.sizes.world / length
    more = "causal_attention" not in kinds or cell.strategy_options.get("pad_heads") or _of_users(cell)
    most = float("inf") if more else model.attention * (1 + allowed)
    if not model.attention * (1 - allowed) <= metered.attention <= most:
        return found, _differs("softmax attention", metered.attention, model.attention)
    if metered.forward < model.forward * (1 - allowed):
        return found, _differs("forward", metered.forward, model.forward)
    return found, ""


def _of_users(cell: Cell) -> bool:
    """Whether a strategy of the cell is of a file or a plug-in of users."""
    files = f"{loose_files.__name__}."
    modules = [cls.__module__ for cls in nesting(cell.strategy).classes]
    return any(name.startswith(files) or not name.startswith("spbench.impls.") for name in modules)


def _differs(what: str, metered: float, model: float) -> str:
    return (
        f"the ranks together have {metered:.6g} FLOPs of {what}, and the model has {model:.6g}: "
        "a rank stands for others that have other work"
    )
