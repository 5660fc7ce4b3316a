"""The types that models and strategies exchange: sites, shards, and the error for sizes that cannot be run,
with the numbers that its messages name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from spbench.impls.attended import Attended
    from spbench.impls.dispatchers.dispatcher import ExpertCall

#: the dim of a tensor that holds the positions; a tuple of dims if positions lie on a grid, of which a
#: strategy chooses one; None: the tensor has no positions, or every rank needs all of them
SequenceDim = int | tuple[int, ...] | None

#: the kinds of sites where positions meet
MeetingKind = Literal[
    "attention",
    "causal_attention",
    "whole_attention",
    "full_attention",
    "linear_attention",
    "gated_recurrence",
    "indexed_attention",
    "project_sequence",
]
#: the other kinds of sites of a model, a layer or a step; most kinds have the name of the hook that runs
OtherKind = Literal[
    "embedding",
    "linear_in",
    "linear_in_text",
    "text_attention",
    "separate_linear_in",
    "grouped_query_linear_in",
    "shared_by_heads",
    "feature_norm",
    "given_heads",
    "rows_before",
    "linear_out",
    "experts",
    "vocabulary_logits",
    "cross_entropy",
    "cross_entropy_in_place",
    "cross_entropy_native",
    "parameters",
    "frozen_parameters",
    "stage_boundary",
    "tied_embedding",
    "overflow_flag",
    "fp8_scales",
    "experts",
]
SiteKind = MeetingKind | OtherKind
SITE_KINDS: frozenset[str] = frozenset(get_args(MeetingKind) + get_args(OtherKind))

#: descriptions of sites where positions meet; a strategy that spreads positions must implement their hooks
MEETINGS: Mapping[str, str] = {
    "attention": "softmax attention under a mask",
    "causal_attention": "causal softmax attention",
    "whole_attention": "softmax attention with dropout, or by way of all scores",
    "full_attention": "softmax attention of all to all on a grid",
    "linear_attention": "linear attention",
    "gated_recurrence": "gated recurrence (Gated DeltaNet, KDA, Mamba-2)",
    "indexed_attention": "attention to keys that an indexer chooses",
    "project_sequence": "Linformer's projection",
}

#: dims of a site of attention that stand for features in addition to the causal mask, with their names
HEEDED: Mapping[str, str] = {
    "documents": "packed documents",
    "window": "sliding windows",
    "sinks": "attention sinks",
    "unlike_values": "values of another head size than keys",
}
#: the features of HEEDED that attention can have, by the kind of site
HEEDS_ALL: Mapping[str, frozenset[str]] = {
    "causal_attention": frozenset(HEEDED),
    "linear_attention": frozenset({"documents"}),
    "gated_recurrence": frozenset({"documents"}),
    "indexed_attention": frozenset({"documents"}),
}
#: the hooks in which positions meet, by the kind of site that calls them
HEEDING: Mapping[str, frozenset[str]] = {
    "causal_attention": frozenset({"causal_attention", "projected_attention", "attend"}),
    "linear_attention": frozenset({"linear_attention"}),
    "gated_recurrence": frozenset({"mix_by_heads", "rows_before", "gated_recurrence"}),
    "indexed_attention": frozenset({"indexed_attention"}),
}


class Unsupported(ValueError):
    """An error for sizes that cannot be run: the reason, and how to mend it, for example by other sizes."""

    def __init__(self, reason: str, mend: str):
        super().__init__(f"{reason}; {mend}")
        self.reason, self.mend = reason, mend


class Unavailable(Unsupported):
    """An error for sizes that need ranks, GPUs or a package that this machine lacks."""


@dataclass(frozen=True)
class Site:
    """An operation that a model asks of its strategy, and how often in a step.

    A model lists its sites so that a strategy can write its communication in closed form without
    knowing the model. ``dims`` holds the shape letters as integers. ``recomputed`` says that
    activation checkpointing runs the forward of this site again during backward. ``experts`` is the call of a
    block of experts to its dispatcher. ``attended`` says what a position of causal attention attends to, and
    ``packed`` by which of these limits placements are chosen (:meth:`Strategy.pack`); None: the site's model
    does not say, or there is only the causal mask.

    Raises:
        ValueError: the kind is not one of :data:`SITE_KINDS`.
    """

    kind: SiteKind
    count: int
    dims: Mapping[str, int] = field(default_factory=dict)
    recomputed: bool = False
    experts: ExpertCall | None = None
    attended: Attended | None = None
    packed: Attended | None = None

    def __post_init__(self) -> None:
        if self.kind not in SITE_KINDS:
            raise ValueError(
                f"a site cannot be {self.kind!r}; its kind is one of {', '.join(sorted(SITE_KINDS))}"
            )


def key_value_size(dims: Mapping[str, int]) -> int:
    """The number of elements of a key and a value of one head at one position, from the dims of a site of
    attention: D for the key (A if the site has no D), and A for the value."""
    return dims.get("D", dims["A"]) + dims["A"]


def runs_again(site: Site) -> bool:
    """Whether backward runs the forward of a site again, because the result is not ``kept``."""
    return site.recomputed and not site.dims.get("kept")


@dataclass(frozen=True)
class Shard:
    """This rank's part of a parameter: part ``index`` of ``parts`` along ``dim``, cut over ``axis``."""

    axis: str
    dim: int
    index: int
    parts: int

    def of(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor (a view)."""
        return full.chunk(self.parts, self.dim)[self.index]

    def full_shape(self, local: torch.Size) -> list[int]:
        """The shape of the full tensor, from this rank's part of it."""
        shape = list(local)
        shape[self.dim] *= self.parts
        return shape

    def replicated(self, local: torch.Size) -> tuple[int, int]:
        """How many of the part's last elements other parts hold too, and how many parts hold them."""
        return 0, 1


@dataclass(frozen=True)
class StackShard(Shard):
    """This rank's part of a parameter that stacks ``experts`` experts along its first dim: ``held`` experts
    from ``first`` on, and of each expert the part of :class:`Shard`."""

    first: int
    held: int
    experts: int

    def of(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor (a view)."""
        return super().of(full.narrow(0, self.first, self.held))

    def full_shape(self, local: torch.Size) -> list[int]:
        """The shape of the full tensor, from this rank's part of it."""
        return [self.experts, *super().full_shape(local)[1:]]


def shard_of(parameter: Tensor) -> Shard | None:
    """The :class:`Shard` of a parameter, or None if every rank holds the whole parameter."""
    return getattr(parameter, "spbench_shard", None)


def mark_shard(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Record on a parameter which part of the full parameter it is; returns the parameter."""
    parameter.spbench_shard = shard  # type: ignore[attr-defined]
    return parameter


def mark_expert(parameter: nn.Parameter, stacked: bool = False) -> nn.Parameter:
    """Record on a parameter that it belongs to a routed expert, or is ``stacked`` from several experts, which
    the ranks along ep divide among them; returns the parameter."""
    parameter.spbench_expert = True  # type: ignore[attr-defined]
    parameter.spbench_stacked = stacked  # type: ignore[attr-defined]
    return parameter


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter belongs to routed experts."""
    return getattr(parameter, "spbench_expert", False)


def stacks_experts(parameter: Tensor) -> bool:
    """Whether the first dim of a parameter counts experts."""
    return getattr(parameter, "spbench_stacked", False)


def divisors(total: int) -> list[int]:
    """All divisors of ``total``, the smallest first."""
    return [n for n in range(1, total + 1) if total % n == 0]


def nearest(sizes: Sequence[int], size: int) -> str:
    """The neighbours of ``size`` in the rising ``sizes``, which do not contain ``size``, as "4 or 6"."""
    below, above = [n for n in sizes if n < size], [n for n in sizes if n > size]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))


def nearest_divisors(total: int, size: int) -> str:
    """The divisors of ``total`` next below and above ``size``, which is no divisor, as "4 or 6"."""
    return nearest(divisors(total), size)
