"""What is taken where nothing is said, each with the flag that says it, and the tokens that a rank gets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.units import shown_count
from spbench.impls.axes import ranks_along
from spbench.impls.models.model import model_preset
from spbench.impls.options import set_options
from spbench.impls.strategies.nesting import nesting

#: settings that an answer names where nothing says them
SETTINGS_TAKEN = frozenset(
    {
        "training.micro_batches",
        "batch",
        "strategy",
        "strategy_options.placement",
        "model_options.attention",
        "precision",
        "training.backend",
    }
)
#: experts of their own on a rank, each traced by itself, that take minutes
_MANY = 4096
#: axes along which a layer's weights are split and its tokens are not
_OF_WEIGHTS = ("tp",)


@dataclass(frozen=True)
class Taken:
    """A setting that nobody gave.

    Attributes:
        what: in words.
        flag: that gives another value.
    """

    what: str
    value: Any
    flag: str

    def __str__(self) -> str:
        return f"{self.what} {self.value} ({self.flag})"


def micro_batch_of(cell: Cell) -> int:
    """Samples of a micro-batch of a replica."""
    return (cell.batch or 1) // (cell.sizes.dp * cell.training.micro_batches)


def tokens_of_rank(cell: Cell) -> int:
    """Tokens of a micro-batch that a rank holds between the layers: those of its replica over the ranks that
    divide the sequence."""
    sizes = cell.sizes.by_axis
    axes = [axis for each in nesting(cell.strategy).axes_of for axis in each if axis not in _OF_WEIGHTS]
    return micro_batch_of(cell) * (cell.seq_len or 0) // ranks_along(axes, sizes)


def taken(cell: Cell, said: Collection[str]) -> list[Taken]:
    """What is taken of a cell.

    Args:
        said: settings that were given, by dotted name.
    """
    return [each for name, each in _settings(cell) if name not in said]


def _settings(cell: Cell) -> Iterator[tuple[str, Taken]]:
    yield "training.micro_batches", Taken("micro-batch", micro_batch_of(cell), "--micro-batch")
    yield "batch", Taken("batch", cell.batch, "--batch")
    nested = nesting(cell.strategy)
    if cell.sizes.world > 1:
        yield "strategy", Taken("strategy", cell.strategy, "--strategy")
    options = set_options(nested.options_type(), cell.strategy_options, cell.strategy)
    if placement := getattr(options, "placement", ""):
        name = "strategy_options.placement"
        yield name, Taken("placement", placement, f"--set {name}")
    model = model_preset(*cell.model_arguments)
    if hasattr(model, "attention"):
        yield (
            "model_options.attention",
            Taken("kernel", model.attention_kernel, "--set model_options.attention"),
        )
    yield "precision", Taken("precision", cell.precision, "--set precision")
    yield "training.backend", Taken("backend", cell.training.backend, "--set training.backend")


def model_line(cell: Cell, name: str = "") -> str:
    """The line of an answer on what its model is taken for: its parameters, those that a token meets where
    experts are routed to, and its layers.

    Args:
        name: what the user calls it; "": as the cell does.
    """
    model: Any = model_preset(*cell.model_arguments)
    every, idle = model_parameters(cell), 0.0
    if experts := getattr(model, "experts", 0):
        routed = model.parameters(model.padded_vocabulary(1))["experts"]
        idle = routed * (1 - model.experts_per_token / experts)
    active = f", {shown_count(every - idle)} of them active" if experts else ""
    layers = f", {model.layers} layers" if hasattr(model, "layers") else ""
    return f"the model {name or cell.model}: {shown_count(every)} parameters{active}{layers}"


def slow_words(cell: Cell) -> str:
    """What makes a trace take minutes: many experts on a rank that are parameters of their own; else ""."""
    model: Any = model_preset(*cell.model_arguments)
    own = 0 if getattr(model, "stacked_experts", True) else model.experts * model.layers
    many = own // cell.sizes.by_axis.get("ep", 1) // cell.sizes.pp
    return f"; {many:,} experts of their own on a rank take minutes" if many >= _MANY else ""


def experts_line(cell: Cell) -> str:
    """The line of an answer on routed experts: how many a rank has, and their part of the model; "" where
    there are none."""
    model: Any = model_preset(*cell.model_arguments)
    if not getattr(model, "experts", 0):
        return ""
    counts = model.parameters(model.padded_vocabulary(1))
    here = model.experts // cell.sizes.by_axis.get("ep", 1)
    share = counts["experts"] / counts["elements"]
    return f"routed experts: {share:.0%} of parameters; {here} of {model.experts} in each layer are on a rank"


def taken_line(cell: Cell, said: Collection[str]) -> str:
    """The line of an answer on what was taken."""
    parts = ", ".join(map(str, taken(cell, said)))
    left = f"taken where nothing was said: {parts}" if parts else "every setting was said"
    return f"{left}; tokens of a micro-batch on a rank: {tokens_of_rank(cell)}"
