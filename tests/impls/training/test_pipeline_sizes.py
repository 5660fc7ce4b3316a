"""What pipeline stages send beside its closed form, and sizes that cannot be divided."""

import pytest
import torch

from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Unsupported
from spbench.impls.training.pipeline import summed
from spbench.impls.training.turns import Turns
from tests.slow import slow

LENGTH = 24
OPTIONS = {"layers": 4, "vocabulary_multiple": 2}
INTERLEAVED = TrainingOptions(micro_batches=4, schedule="interleaved", virtual_stages=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["single", "tensor_parallel", "ring_self_attention"])
@pytest.mark.parametrize(("pp", "dp"), [(4, 2), slow(1, 1), slow(1, 2), slow(4, 1)])
@pytest.mark.parametrize("precision", ["fp16", slow("fp32")])
def test_every_stage_sends_what_the_closed_form_says(strategy: str, pp: int, dp: int, precision: str) -> None:
    cls = strategy_class(strategy)
    cell = Cell(
        model="bert-tiny",
        strategy=strategy,
        sizes=Sizes(dp=dp, pp=pp, **dict.fromkeys(cls.axes, 4)),
        batch=16,
        seq_len=LENGTH,
        precision=precision,  # type: ignore[arg-type]
        model_options=OPTIONS,
        training=TrainingOptions(micro_batches=8),
    )
    result = VirtualEngine().measure(cell)
    assert result.formula_difference == []
    if pp * dp > 1 or cls.axes:
        assert result.communication


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sizes": Sizes(pp=3)}, "4 layers cannot be split over 3 pipeline stages; use 1, 2, 4"),
        ({"training": TrainingOptions(micro_batches=3)}, "batch 8 cannot be divided into 3 micro-batches"),
        ({"sizes": Sizes(dp=3)}, "use 6 or 9"),
        ({"sizes": Sizes(pp=4), "training": INTERLEAVED}, "4 layers cannot be split over 8 pipeline stages"),
        (
            {"sizes": Sizes(pp=2), "training": TrainingOptions(micro_batches=2, stage_layers=[1, 2])},
            "stage_layers has 2 stages with 3 layers in all; give 2 numbers that make 4",
        ),
        (
            {"sizes": Sizes(pp=4), "training": INTERLEAVED.model_copy(update={"microbatch_group_size": 3})},
            "microbatch_group_size 3 is not between pp 4 and 4 micro-batches",
        ),
        ({"training": INTERLEAVED}, "for several pipeline stages; use pp 2 or more"),
        (
            {"sizes": Sizes(pp=4), "training": INTERLEAVED.model_copy(update={"micro_batches": 2})},
            "cannot run 2 micro-batches on pp 4; use 4",
        ),
    ],
)
def test_sizes_that_do_not_divide(change: dict[str, object], reason: str) -> None:
    cell = Cell(model="bert-tiny", strategy="single", batch=8, seq_len=LENGTH, model_options=OPTIONS)
    with pytest.raises(Unsupported, match=reason):
        VirtualEngine().measure(cell.model_copy(update=change))


def test_virtual_stages_are_those_of_one_schedule() -> None:
    with pytest.raises(ValueError, match="virtual_stages is for schedule: interleaved"):
        TrainingOptions(virtual_stages=2)
    with pytest.raises(ValueError, match="schedule: interleaved needs virtual_stages: 2 or more"):
        TrainingOptions(schedule="interleaved")


def interleaved_cell(pp: int, virtual_stages: int, strategy: str = "single", **axes: int) -> Cell:
    interleaved = {"schedule": "interleaved", "virtual_stages": virtual_stages} if virtual_stages > 1 else {}
    return Cell(
        model="bert-tiny",
        strategy=strategy,
        sizes=Sizes(pp=pp, **axes),
        batch=16,
        seq_len=LENGTH,
        precision="fp16",
        model_options={"layers": 8, "vocabulary_multiple": 2},
        training=TrainingOptions.model_validate({"micro_batches": 8, **interleaved}),
        cluster="dgx-a100",
    )


@pytest.mark.parametrize(("strategy", "axes"), [("single", {}), slow("megatron_sp", {"tp": 2})])
def test_interleaved_stages_send_what_the_closed_form_says(strategy: str, axes: dict[str, int]) -> None:
    assert VirtualEngine().measure(interleaved_cell(2, 2, strategy, **axes)).formula_difference == []


def test_an_interleaved_rank_runs_ahead_by_all_its_forwards_at_most() -> None:
    assert [Turns(rank, ranks=4, chunks=2, micro_batches=4).ahead for rank in range(4)] == [8, 8, 6, 4]
    assert Turns(0, ranks=4, chunks=2, micro_batches=8).ahead == 10


def test_a_stage_without_losses_has_zero_where_its_inputs_are() -> None:
    inputs = [{"tokens": torch.empty(2, device="meta")}]
    assert summed([], inputs).device.type == "meta"
    assert summed([torch.tensor(1.0), torch.tensor(2.0)], inputs) == 3
