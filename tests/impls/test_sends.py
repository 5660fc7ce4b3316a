"""What a step sends is what its closed form says: of cells in closed_forms.yaml, on virtual ranks."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.strategies.nesting import nesting
from tests.grid import cases
from tests.measure.engines.cells import written_cell


@pytest.mark.parametrize("fields", cases(Path(__file__).with_name("closed_forms.yaml")))
def test_the_closed_form_is_what_virtual_ranks_send(fields: dict[str, Any]) -> None:
    rank, asked = fields.pop("of_rank", None), written_cell(fields)
    if rank is None:
        measured = VirtualEngine().measure(asked)
    else:
        measured = tracing.trace(asked, rank % asked.sizes.world).measurement(None)
    assert measured.formula_difference == []
    assert measured.communication
    assert {*nesting(asked.strategy).axes} <= {
        a for row in measured.communication for a in row["axis"].split("_")
    }
