"""AdamW with moments in another precision than the weights, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.impls.backends.megatron_options import MegatronOptions
from spbench.impls.backends.narrow_moments import NarrowMoments
from spbench.impls.backends.optimizer import PRECISIONS


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (7,))]


def stepped(adam: NarrowMoments | torch.optim.AdamW, held: list[Tensor]) -> list[Tensor]:
    for step in range(4):
        for x in held:
            x.grad = (x.detach() + step).sin()
        (adam.update if isinstance(adam, NarrowMoments) else adam.step)()
    return held


@pytest.mark.parametrize("kept", [False, True])
def test_updates_are_those_of_torchs_adamw(kept: bool) -> None:
    """In float64, where nothing is rounded; with moments that are there before the first step too."""
    ours, theirs = weights(), [x.requires_grad_() for x in weights()]
    adam = NarrowMoments(ours, PRECISIONS["fp64"], torch.float64, with_moments=kept, lr=0.01)
    expected = stepped(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.01), theirs)
    torch.testing.assert_close(stepped(adam, ours), [x.detach() for x in expected], rtol=1e-13, atol=1e-15)


def test_moments_have_two_bytes_and_are_rounded() -> None:
    ours, exact = weights(), weights()
    adam = NarrowMoments(ours, PRECISIONS["fp64"], torch.bfloat16, with_moments=False, lr=0.01)
    stepped(NarrowMoments(exact, PRECISIONS["fp64"], torch.float64, with_moments=False, lr=0.01), exact)
    stepped(adam, ours)
    assert [x.dtype for x in adam.tensors()] == [torch.bfloat16] * 4
    change = torch.cat([(a - b).flatten() for a, b in zip(ours, exact, strict=True)]).abs().max()
    assert 1e-6 < change < 1e-3  # of steps of 0.01 each


@pytest.mark.parametrize(
    "options", [{"optimizer": "host", "distributed_optimizer": True}, {"update": "muon"}]
)
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="exp_avg_dtype: bf16 needs update: adam"):
        MegatronOptions(exp_avg_dtype="bf16", **options)  # type: ignore[arg-type]


def test_a_precision_whose_moments_stay_as_they_are_is_refused() -> None:
    training = {"backend": "megatron", "exp_avg_dtype": "bf16"}
    asked = {"model": "gpt-tiny", "strategy": "single", "batch": 1, "seq_len": 8, "training": training}
    assert Cell.model_validate({**asked, "precision": "bf16"}).precision == "bf16"
    with pytest.raises(ValueError, match="exp_avg_dtype: bf16 needs precision: bf16"):
        Cell.model_validate({**asked, "precision": "fp32"})
