"""How unevenly tokens go to the ranks that have their experts, by a cell's routing."""

from __future__ import annotations

from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import planned_strategy
from spbench.impls.dispatchers.sent_tokens import dropped_tokens, rows_of_ranks
from spbench.impls.models.model import model_preset


def expert_load(cell: Cell) -> dict[str, Any]:
    """The fields of a measurement that say it: ``expert_imbalance``, ``dropped_tokens`` and ``routing``; none
    for a model without experts."""
    model, (batch, seq_len) = model_preset(*cell.model_arguments), cell.shape
    replicas, micro_batches = cell.sizes.dp, cell.training.micro_batches
    of_replica = batch // replicas // micro_batches
    site = next((s for s in model.sites(of_replica, seq_len) if s.kind == "experts"), None)
    if site is None or site.experts is None:
        return {}
    call, strategy = site.experts, planned_strategy(cell)
    rows = rows_of_ranks(call, strategy, of_replica, seq_len)
    dropped = dropped_tokens(call, strategy, of_replica, seq_len) * micro_batches
    routing = "learned" if call.learned else call.plan.routing
    if call.learned and cell.engine == "virtual":
        routing = "learned, taken as even"
    return {
        "expert_imbalance": float(rows.max() / rows.mean()) if rows.any() else 1.0,
        "dropped_tokens": dropped,
        "routing": routing,
    }
