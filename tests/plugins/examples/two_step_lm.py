"""A language model whose layers feed forward in two steps: y = W_4 relu(W_3 W_2 relu(W_1 x))."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

import spbench


@dataclass(frozen=True)
class TwoSteps(spbench.FeedForward):
    """Two MLPs, one after the other, each as wide as the model says."""

    def build(self, model, strategy):
        return TwoStepsModule(model, strategy)

    def sites(self, model, batch, seq_len, again, spared):
        dims = {"B": batch, "L": seq_len, "H": model.hidden, "F": model.inner}
        weights = {"mlp": model.hidden * model.inner}
        closes = dims | ({"kept": 1} if model.keeps_operators else {}) | weights
        return [
            spbench.Site("linear_in", 2, dims | weights, again),
            spbench.Site("linear_out", 1, closes, again),
            spbench.Site("linear_out", 1, closes, again and not spared),
        ]

    def parameters(self, model):
        split = 4 * model.hidden * model.inner
        return {"split": split, "mlp": split}


class TwoStepsModule(nn.Module):
    """x [B, L, H] -> [B, L, H]."""

    def __init__(self, model, strategy):
        super().__init__()
        layers, hidden, inner = strategy.of_mlp, model.hidden, model.inner
        self.opens = nn.ModuleList(layers.grouped_linear_in(hidden, inner, 1) for _ in range(2))
        self.closes = nn.ModuleList(layers.linear_out(inner, hidden) for _ in range(2))

    def forward(self, x):
        for opens, closes in zip(self.opens, self.closes, strict=True):
            (y,) = opens(x)
            x = closes.project(F.relu(y))
        return x


class TwoStepModel(spbench.CausalTransformerModel):
    """A causal transformer with such blocks in all layers."""

    def feeding(self, layer):
        return TwoSteps()


PRESETS = {"two-step-lm-tiny": TwoStepModel(layers=2, hidden=48, heads=12, inner=96, vocabulary=96)}
