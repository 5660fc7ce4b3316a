"""The layout that a job or a scenario has already, and what of it every other layout keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.measure import written
from spbench.bench.tools.choose.suggestions import dotted
from spbench.bench.tools.jobs.flags import several_ranks
from spbench.impls import backend_class, set_options

#: options of a model that save memory, which a search chooses anew: names begin or end so
_SWITCHES, _TILES = ("recompute", "checkpoint"), "_tile"
#: options of a backend that count ranks, that another backend stands for, or of an optimizer on the host,
#: which a search chooses anew
_CHOSEN = {
    *("data_parallel_replicate_degree", "num_distributed_optimizer_instances", "gradients"),
    *("optimizer_offload_fraction", "use_precision_aware_optimizer"),
}
#: settings of ``training`` that say which steps are measured
_OF_MEASUREMENT = {"steps", "moments"}


@dataclass(frozen=True)
class OwnLayout:
    """A layout that is asked about beside those that are searched.

    Attributes:
        cell: as it is.
        kept: options of its backend, which every layout has whose backend has them.
        released: options of its model that other layouts choose anew.
        job: the kind of job that it was read from; "": of none.
    """

    cell: Cell
    kept: Mapping[str, Any]
    released: Mapping[str, Any]
    job: str = ""

    @classmethod
    def of(cls, cell: Cell, said: Mapping[str, Any], job: str = "") -> OwnLayout:
        """The layout of a cell.

        Args:
            said: settings that are given of every layout, by dotted name.
        """
        released = {
            name: value
            for name, value in cell.model_options.items()
            if (name.startswith(_SWITCHES) or name.endswith(_TILES)) and f"model_options.{name}" not in said
        }
        return cls(cell, _kept(cell.training), released, job)

    @property
    def looked_at(self) -> Cell:
        """The cell in the form that a search gives to all: one step, with Adam's moments, and the strategy
        "single" if its strategy divides nothing."""
        content = self.cell.training.model_dump(exclude_defaults=True, exclude=_OF_MEASUREMENT)
        update: dict[str, Any] = {"training": TrainingOptions.model_validate(content), "variant": ""}
        if several_ranks(self.cell)[0].name == "single":
            update |= {"strategy": "single", "strategy_options": {}}
        return self.cell.model_copy(update=update)

    def without_switches(self) -> Cell:
        """The cell without the options that other layouts choose anew."""
        rest = {name: v for name, v in self.cell.model_options.items() if name not in self.released}
        return self.cell.model_copy(update={"model_options": rest})

    def training(self, backend: str, searched: Mapping[str, Any]) -> dict[str, Any] | None:
        """The settings of ``training`` of a layout with a backend: some that are searched, and those that are
        kept; None: they cannot be together, or the backend lacks the job's update, as Muon's."""
        usual = backend_class(backend).options_type()
        there = asdict(usual)
        if self.kept.get("update", "adam") != there.get("update", "adam") and "update" not in there:
            return None
        own = {name: value for name, value in self.kept.items() if there.get(name, value) != value}
        try:
            set_options(usual, {**own, **searched}, backend)
        except ValueError:
            return None
        return {"backend": backend, **own, **searched}

    def remarks(self) -> list[str]:
        """Remarks on which of its options other layouts choose anew, and which they keep."""
        lines = []
        if self.released:
            switches = written(dotted("model_options", self.released))
            lines.append(f"other layouts than yours choose anew: {switches}; --set keeps one")
        if own := {name: self.kept[name] for name in self.cell.training.backend_options if name in self.kept}:
            lines.append(f"kept where a backend has it: {written(dotted('training', own))}")
        return lines


def _kept(training: TrainingOptions) -> dict[str, Any]:
    """The options of a backend that other layouts have too, by name: all but those that a search chooses."""
    kind = backend_class(training.backend).options_type
    options = asdict(set_options(kind(), training.backend_options, training.backend))
    searched = {name for each in kind.searched() for name in each}
    kept = {name: value for name, value in options.items() if name not in {*searched, *_CHOSEN}}
    if kept.get("accumulate_allreduce_grads_in_fp32"):
        kept["reduce_dtype"] = "fp32"  # what Megatron-LM's buffers are to fully_shard
    return kept
