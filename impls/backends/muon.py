"""Muon (Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982) for the weights that
are matrices, AdamW for the others.

As TensorParallelMuon of Megatron-Core (core/optimizer/emerging_optimizers.py, commit d98e8a64), which updates
by Emerging-Optimizers (commit fd77292): a matrix has one moment, the mean of its gradients, whose singular
values Newton-Schulz steps bring near 1. These are matmuls in bfloat16 of float32 moments. Megatron-Core
orthogonalises queries', keys' and values' rows of one weight apart; here a weight is one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.collectives import all_gather

#: coefficients of the steps, the first again after the last: "quintic" of Emerging-Optimizers
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
#: of the mean of gradients, and of the weights' decay
MOMENTUM, DECAY = 0.95, 0.01
#: an update's scale beside the root of the longer side, with which its size is AdamW's (arXiv 2502.16982)
SCALE = 0.2


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter: a matrix that is no word embedding and no head. A weight of several
    projections [n, rows, H] is one too."""
    parts = name.split(".")
    return parameter.ndim > 1 and parts[-1] != "head" and parts[-2:] != ["embedding", "weight"]


def orthogonalised(
    x: Tensor, steps: int, coefficients: Sequence[tuple[float, float, float]] = QUINTIC
) -> Tensor:
    """x [M, N] with its singular values brought near 1, by Newton-Schulz steps on the shorter side; those of
    a float32 x are in bfloat16."""
    shorter = x.mT if x.shape[0] > x.shape[1] else x
    y = F.normalize(shorter, dim=(-2, -1), eps=1e-15)  # type: ignore[arg-type]
    y = y.to(torch.bfloat16) if x.dtype == torch.float32 else y
    for a, b, c in islice(cycle(coefficients), steps):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        del gram
    y = y.to(x.dtype)
    return y.mT if x.shape[0] > x.shape[1] else y


@dataclass(frozen=True)
class Matrix:
    """A weight that Muon updates.

    Attributes:
        values: its elements on this rank, flat, with a gradient.
        shape: of these.
        group: the ranks that hold its parts along ``dim``, which are orthogonalised together; None: this rank
            orthogonalises what it holds.
        stacked: its first dim counts matrices, those of experts, each of which is orthogonalised alone.
    """

    values: Tensor
    shape: torch.Size
    group: dist.ProcessGroup | None = None
    dim: int = 0
    stacked: bool = False


class Muon(Optimizer):
    """Muon for matrices, and AdamW for other weights, which are updated last.

    Args:
        others: the weights of AdamW.
        steps: of Newton and Schulz.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        others: Sequence[Tensor],
        precision: Precision,
        *,
        steps: int,
        coefficients: Sequence[tuple[float, float, float]] = QUINTIC,
        **settings: Any,
    ):
        super().__init__(others, replace(precision, master=False), **settings)
        self.matrices, self.steps, self.coefficients = matrices, steps, coefficients
        later = not settings["with_moments"]
        #: of each matrix; None before its first update
        self.moments = [None if later else torch.zeros_like(m.values) for m in matrices]

    def gradients(self) -> list[Tensor]:
        """Those of the matrices first."""
        of_matrices = [m.values.grad for m in self.matrices if m.values.grad is not None]
        return [*of_matrices, *super().gradients()]

    @torch.no_grad()
    def update(self) -> None:
        rate = self.adam.param_groups[0]["lr"]
        for number, matrix in enumerate(self.matrices):
            values, gradient = matrix.values, matrix.values.grad
            assert gradient is not None
            if (moment := self.moments[number]) is None:
                moment = self.moments[number] = torch.zeros_like(values)
            values.mul_(1 - rate * DECAY)
            moment.lerp_(gradient, 1 - MOMENTUM)
            values.add_(self._update(matrix, moment), alpha=-rate)
        super().update()

    def _update(self, matrix: Matrix, moment: Tensor) -> Tensor:
        x = moment.view(matrix.shape)
        if matrix.group is not None:
            x = all_gather(x, matrix.dim, matrix.group)
        if matrix.stacked:
            update = torch.stack([self._orthogonal(each) for each in x])
        else:
            update = self._orthogonal(x)
        if matrix.group is not None:
            update = update.chunk(matrix.group.size(), matrix.dim)[matrix.group.rank()]
        return update.flatten()

    def _orthogonal(self, x: Tensor) -> Tensor:
        """The update of one matrix [..., N]."""
        rows = x.flatten(0, -2)
        update = orthogonalised(rows, self.steps, self.coefficients) * max(rows.shape) ** 0.5 * SCALE
        return update.view(x.shape)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(moment for moment in self.moments if moment is not None)]
