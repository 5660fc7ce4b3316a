"""What blocks of experts send, in closed form, the same under every strategy: they have axes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from spbench.impls.dispatchers.sent_tokens import planned_counts
from spbench.impls.layout import Site
from spbench.impls.registries import dispatchers
from spbench.impls.traffic import Traffic

if TYPE_CHECKING:
    from spbench.impls.strategies.base import Strategy


def experts_traffic(site: Site, strategy: Strategy, element_bytes: int) -> Iterator[Traffic]:
    """What this rank sends for blocks of experts in one micro-batch.

    Args:
        site: of kind "experts".
        strategy: of this rank, the outermost.
        element_bytes: of hidden states.
    """
    call, d, place = site.experts, site.dims, strategy.place
    assert call is not None, "a site of experts says what it asks of a dispatcher"
    axes, replicas = strategy.position_axes, ("dp",) if call.aux_loss == "global" else ()
    entries = []
    if call.aux_loss != "none":
        tallied = (d["B"] if call.aux_loss == "sequence" else 1) * call.plan.experts * 8
        entries.append(
            Traffic("forward", "tokens of each expert", "all_reduce", 1, tallied, (*replicas, *axes))
        )
    if place.size("ep", "etp") > 1:
        tokens = d["B"] * d["L"] // place.size(*axes)
        dispatcher = dispatchers()[call.dispatcher]
        planned = dispatcher(replace(place, mesh=None), call.plan.experts, "plain", call.node_ranks)
        counts = planned_counts(call, strategy, d["B"], d["L"], planned.parts)
        sends = planned.traffic(call, d["H"], tokens, counts, element_bytes)
        varies = call.learned and dispatcher.by_counts and not call.padded
        entries += [replace(entry, varies=varies) for entry in sends]
    for entry in entries:
        yield entry.times(site.count)
        if site.recomputed and entry.phase == "forward" and entry.collective not in call.kept:
            again = replace(entry, phase="backward", purpose=f"{entry.purpose}, again")
            yield again.times(site.count)
