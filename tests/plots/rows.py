"""Result rows and comparison tables for figures, without running anything."""

from typing import Any

import pandas as pd

from spbench.bench.cell import Cell

STRATEGY_AXIS = {"tensor_parallel": "tp", "ring_self_attention": "sp"}


def searched(
    strategy: str, ranks: int, answer: int | None, status: str = "ok", quantity: str = "seq_len", **cell: Any
) -> dict[str, Any]:
    """The row of a search; the quantity not searched for is 64."""
    given = "batch" if quantity == "seq_len" else "seq_len"
    content = {
        "model": "bert-base",
        "strategy": strategy,
        "sizes": {"dp": 1, "pp": 1, STRATEGY_AXIS[strategy]: ranks},
        given: 64,
        quantity: None,
        "cluster": "piz-daint-p100",
        "engine": "virtual",
        "precision": "fp16",
        "search": {"quantity": quantity, "step": 4},
        "variant": "first-steps",
        **cell,
    }
    key = "/".join(map(str, (content["model"], strategy, ranks, quantity, content["variant"])))
    reason = "" if status == "ok" else f"reason of {status}"
    return {
        "key": key,
        "cell": content,
        "status": status,
        "reason": reason,
        "measurement": {"answer": answer} if answer else {},
    }


def compared(
    claim: str, published: float, ours: float | None, numerator: str, denominator: str = "", **other: str
) -> dict[str, Any]:
    """A row of a comparison table."""
    return {
        "claim": claim,
        "published": published,
        "reproduced": ours,
        "relative_error": None if ours is None else ours / published - 1,
        "role": "predicted",
        "note": "",
        "variant": "first-steps",
        "numerator": numerator,
        "denominator": denominator,
        **other,
    }


def table(*entries: dict[str, Any]) -> pd.DataFrame:
    """A comparison table."""
    return pd.DataFrame(list(entries))


def ran(status: str = "ok", measurement: dict[str, Any] | None = None, **cell: Any) -> dict[str, Any]:
    """The row of a cell, with what was measured if it ran through."""
    return row_of(Cell.model_validate(cell), measurement or {} if status == "ok" else {}, status)


def row_of(cell: Cell, measurement: Any, status: str = "ok") -> dict[str, Any]:
    """The row of a cell, with this measurement whatever the status is."""
    reason = "" if status == "ok" else f"reason of {status}"
    of_cell = {"key": cell.key, "cell": cell.model_dump(mode="json")}
    return {**of_cell, "status": status, "reason": reason, "measurement": measurement}


def published(row: dict[str, Any], quantity: str, number: float | None, status: str = "ok") -> dict[str, Any]:
    """A row of a comparison table, of one number of a published table."""
    return {
        "claim": f"{quantity} of {row['key']}",
        "cell": row["key"],
        "strategy": row["cell"]["strategy"],
        "quantity": quantity,
        "published": number,
        "status_published": status,
    }
