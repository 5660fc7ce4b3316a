"""The training programs whose steps cells stand for, and where what is simulated stands in for something else
that they run. Such steps were measured to take longer, so intervals of their times are as wide as that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from spbench.bench.errors import shown, suggestion

#: names of what trains: axolotl, LLaMA-Factory and TRL run transformers' Trainer, or DeepSpeed where they
#: have a configuration of it; Megatron-Bridge, Primus and ms-swift by Megatron run "megatron"
PROGRAMS = (
    *("automodel", "deepspeed", "llm_foundry", "megatron", "prime_rl", "torchtitan", "transformers"),
    *("veomni", "verl"),
)
#: the backends of torch's fully_shard, which DeepSpeed's stages 2 and 3 are simulated by
_SHARDED = ("zero2", "zero3")
#: the grade of what is priced so, whose share is the whole step
STAND_IN = "stand-in"


class StandIn(NamedTuple):
    """Work of programs, and what stands in for it.

    Attributes:
        by: "" where it is not known what of the work takes longer than it is simulated to.
        programs: that have it; empty: each that a cell names.
        backends: with which it is so; empty: with any.
        axis: of which there are several ranks; "nodes": ranks of several nodes; "": any cell.
        network: what the cluster's file says that its network is priced by; "": any, of a named program.
    """

    work: str
    by: str
    programs: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    axis: str = ""
    network: str = ""

    @property
    def price(self) -> dict[str, Any]:
        """As an entry of :attr:`Measurement.priced_by`."""
        return {"work": self.work, "by": self.by, "grade": STAND_IN, "share": 1.0}

    def __str__(self) -> str:
        """The class of the times in which it stands in (:attr:`Measurement.rates`)."""
        return f"{self.work} priced as {self.by}" if self.by else f"{self.work}, measured slower"


#: of a cell with several the first is the class of its time
STAND_INS = (
    StandIn("EFA", "InfiniBand", axis="nodes", network="InfiniBand"),
    StandIn("DeepSpeed", "fully_shard", ("deepspeed",), _SHARDED),
    StandIn("expert parallelism", "", axis="ep"),
    StandIn("torchtitan's TP", "Megatron's", ("torchtitan",), axis="tp"),
    StandIn("torchtitan over nodes", "", ("torchtitan",), _SHARDED, "nodes"),
)


#: the classes of times with them
STOOD_IN = tuple(map(str, STAND_INS))


def stand_ins(program: str, backend: str, ranks: Mapping[str, int], network: str = "") -> Iterator[StandIn]:
    """What stands in for work of a program, in a cell with a backend of data parallelism.

    Args:
        program: "" has none: the step is that of this suite.
        ranks: along each axis, and ``nodes``.
        network: what the network is priced by instead of a rate of its own; "": nothing.
    """
    for each in STAND_INS:
        of_program = network == each.network if each.network else program in (each.programs or (program,))
        is_so = of_program and backend in (each.backends or (backend,)) and (program or each.network)
        if is_so and (not each.axis or ranks.get(each.axis, 1) > 1):
            yield each


def _checked(name: str) -> str:
    if name and name not in PROGRAMS:
        raise ValueError(f"unknown program {shown(name)}{suggestion(name, PROGRAMS)}; others have none")
    return name


#: the name of a program, or ""
Program = Annotated[str, AfterValidator(_checked)]
