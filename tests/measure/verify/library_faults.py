"""Losses over a split vocabulary, with a planted fault each. None is registered."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist
from torch import Tensor

from spbench.impls.kernels import cross_entropy
from spbench.impls.strategies.megatron_sp import MegatronSP, whole_ids
from spbench.impls.strategies.tensor_parallel import TensorParallel


class DenominatorOfOwnRows(TensorParallel):
    """The softmax's denominator is that of this rank's part of the vocabulary."""

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str) -> Tensor:
        def own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
            return x.clone()

        with mock.patch.object(cross_entropy, "all_gather_flat", own):
            return super().cross_entropy(logits, labels, way=way)


class GradientsOfOwnPositionsAlone(MegatronSP):
    """The losses of positions that are another rank's give no gradient to this rank's rows."""

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str) -> Tensor:
        loss = TensorParallel.cross_entropy(self, logits, whole_ids(labels, self.group), way=way)
        return loss.chunk(self.size, 1)[self.rank]


class LabelsOfOwnPositions(MegatronSP):
    """Every rank's labels are taken for those of the first positions."""

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str) -> Tensor:
        rolled = whole_ids(labels, self.group).roll(labels.shape[1], 1)
        return super().cross_entropy(logits, rolled.chunk(self.size, 1)[self.rank], way=way)
