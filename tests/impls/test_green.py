"""Ranks compute what one device does, with every strategy and option of green.yaml. What a step sends is
what its closed form says: of cells in closed_forms.yaml, on virtual ranks.
"""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.layout import MEETINGS
from spbench.impls.registries import model_preset
from spbench.impls.strategies.nesting import nesting
from tests.grid import cases
from tests.measure.engines.cells import written_cell
from tests.measure.verify.assertions import assert_green
from tests.measure.verify.attention_model import AttentionModel


@pytest.mark.parametrize("fields", cases(Path(__file__).with_name("green.yaml")))
def test_ranks_compute_what_one_device_does(pool: RankPool, fields: dict[str, Any]) -> None:
    fields = {"part": "model", "ranks": 4, "model_options": {}, **fields}
    name, options, ranks = (fields.pop(field) for field in ("model", "model_options", "ranks"))
    # the name of a model, or the kind of an attention alone
    model = AttentionModel(name, **options) if name in MEETINGS else model_preset(name, options)
    case = Case(**{**fields, "strategy": nesting(fields["strategy"]), "model": model})
    assert_green(pool, case, case.strategy.meshes(4)[0] if ranks == "2x2" else ranks)


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
