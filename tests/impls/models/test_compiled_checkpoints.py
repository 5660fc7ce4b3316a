"""What torch compiles of layers in activation checkpoints, which prime_rl_dense.yaml rests on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Layer(nn.Module):
    def __init__(self, branches: bool):
        super().__init__()
        self.linear, self.branches = nn.Linear(8, 8), branches

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.linear(x)
        if self.branches and positions.diff().sum() == 0:
            y = y + 1
        return x + torch.sin(y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointed", "branches", "compiled"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_a_checkpointed_layer_with_a_branch_on_a_tensor_is_not_compiled(
    checkpointed: bool, branches: bool, compiled: bool
) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    layer: nn.Module = Layer(branches)
    if checkpointed:
        layer = checkpoint_wrapper(layer, preserve_rng_state=False)
    layer.compile(backend=backend)
    layer(torch.randn(4, 8, requires_grad=True), torch.arange(4)).sum().backward()
    assert bool(graphs) == compiled
