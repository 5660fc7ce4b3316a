"""The checker rejects what goes wrong when grids are cut and switched."""

from __future__ import annotations

import pytest

from spbench.bench.cell import Cell, Sizes
from spbench.bench.engines.virtual import VirtualEngine
from spbench.bench.ranks.rank_pool import RankPool
from spbench.bench.verification.cases import verify_case
from spbench.bench.verification.oracle import Case
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.megatron_sp import MegatronSP
from tests.bench.verification import grid_faults as faults

# the fault, the frames of the model that show it, and how the name of the worst tensor may begin
FAULTS: list[tuple[type[Strategy], int, tuple[str, ...]]] = [
    (faults.PartsInWrongOrder, 8, ("output", "gradient of")),
    (faults.PaddingAttendedTo, 6, ("output", "gradient of")),
    (faults.PaddingInTheLoss, 6, ("output loss", "output noise_loss", "positions", "gradient of")),
    (faults.TextCountedTwice, 12, ("gradient of text", "gradient of input text", "gradient of blocks")),
    (faults.WeightCountedNTimes, 12, ("gradient of blocks",)),
    (faults.LinesOfOneRankOnly, 12, ("output", "gradient of")),
]


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize(("fault", "temporal", "plausible"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_planted_fault_is_red(
    pool: RankPool, fault: type[Strategy], temporal: int, plausible: tuple[str, ...], dtype: str
) -> None:
    model = model_preset("st-dit-tiny", {"temporal": temporal, "layers": 1})
    row = verify_case(pool, Case(fault, model, "model", dtype, batch=1), 4)
    assert row.status == "RED"
    assert row.tensor, row.reason  # wrong, not broken
    assert row.tensor.startswith(plausible), row


def test_text_that_is_gathered_again_is_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    """N copies of the text change no number, for a softmax over all is that over one; but what is sent."""
    cell = Cell(
        model="st-dit-tiny", strategy="megatron_sp", sizes=Sizes(tp=4), batch=1, seq_len=24, precision="bf16"
    )
    assert VirtualEngine().measure(cell).formula_difference == []
    monkeypatch.setattr(MegatronSP, "linear_in_text", MegatronSP.linear_in)
    different = VirtualEngine().measure(cell).formula_difference
    assert {(row["phase"], row["collective"]) for row in different} == {
        ("forward", "all_gather"),
        ("backward", "all_gather"),
        ("backward", "reduce_scatter"),
    }
