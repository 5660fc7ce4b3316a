"""What a step sends is what its closed form says: on virtual ranks of closed_forms.yaml, and on real ones too
of real_ranks.yaml."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.strategies.nesting import nesting
from tests.grid import cases
from tests.measure.engines.cells import assert_real_ranks_send_the_same


def cell(fields: dict[str, Any]) -> Cell:
    """With ``ranks`` along the strategy's axis, where no sizes are named."""
    ranks = fields.pop("ranks", None)
    return Cell.model_validate(
        ({"sizes": nesting(fields["strategy"]).sizes_for(ranks)} if ranks else {}) | fields
    )


@pytest.mark.parametrize("fields", cases(Path(__file__).with_name("closed_forms.yaml")))
def test_the_closed_form_is_what_virtual_ranks_send(fields: dict[str, Any]) -> None:
    rank, asked = fields.pop("of_rank", None), cell(fields)
    if rank is None:
        measured = VirtualEngine().measure(asked)
    else:
        measured = tracing.trace(asked, rank % asked.sizes.world).measurement(None)
    assert measured.formula_difference == []
    assert measured.communication
    assert {*nesting(asked.strategy).axes} <= {
        a for row in measured.communication for a in row["axis"].split("_")
    }


@pytest.mark.parametrize("fields", cases(Path(__file__).with_name("real_ranks.yaml")))
def test_real_ranks_send_what_virtual_ones_do(pool: RankPool, fields: dict[str, Any]) -> None:
    assert_real_ranks_send_the_same(pool, cell(fields))
