"""Head and loss in tiles of the vocabulary, and an update of all weights at once, beside torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile

from spbench.impls.backends.optimizer import PRECISIONS, Optimizer
from spbench.impls.kernels.host_reads import samples_begun
from spbench.impls.kernels.vocabulary_tiles import token_losses
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy


@pytest.mark.parametrize("rows", [1, 7, 20, 64])
def test_tiles_make_the_loss_and_its_gradients(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 20))
    labels, d_loss = torch.randint(20, (2, 3)), torch.randn(2, 3, dtype=torch.float64)
    loss = token_losses(x.view(2, 3, 8), weight, labels, rows)
    expected = F.cross_entropy(x @ weight.T, labels.flatten(), reduction="none").view(2, 3)
    for got, right in zip(
        (loss, *torch.autograd.grad(loss, [x, weight], d_loss)),
        (expected, *torch.autograd.grad(expected, [x, weight], d_loss)),
        strict=True,
    ):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("later", [True, False])
def test_an_update_of_all_weights_is_that_of_each(later: bool) -> None:
    updated = []
    for foreach in (True, False):
        torch.manual_seed(0)
        weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (5,))]
        optimizer = Optimizer(weights, PRECISIONS["fp64"], with_moments=not later, lr=0.1, foreach=foreach)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        updated.append(weights)
    for got, right in zip(*updated, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=0)


def test_an_update_of_all_weights_heeds_no_overflow() -> None:
    with pytest.raises(Unsupported, match="use implementation: fused, or bf16"):
        Optimizer([torch.ones(1)], PRECISIONS["fp16"], with_moments=True, foreach=True)


def test_the_host_reads_positions_once_a_micro_batch_and_counts_samples() -> None:
    assert samples_begun(torch.tensor([0, 1, 2, 0, 1, 0, 0])) == 2  # padding begins none
    model = model_preset("causal-transformer-tiny", {"positions_read": True, "packing_read": True})
    module = model.build(Strategy(), 16)
    with profile() as counted:
        module(model.inputs(2, 16, torch.Generator()))
    counts = {each.key: each.count for each in counted.key_averages()}
    assert (counts["spbench::samples_begun"], counts["spbench::read_by_host"]) == (1, model.layers)
