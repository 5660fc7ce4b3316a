"""AdamW of which a part is on the host: HybridDeviceOptimizer of Megatron-Core
(core/optimizer/cpu_offloading, commit d98e8a64) at an optimizer_offload_fraction below 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.backends.optimizer_options import HostLayout


def first_of(sizes: Sequence[int], fraction: float) -> Iterator[bool]:
    """Whether each weight is on the host: the first ones, until these have that fraction of all elements."""
    enough, before = sum(sizes) * fraction, 0
    for size in sizes:
        yield before < enough
        before += size


class PartOnHost(HostOptimizer):
    """AdamW on the host for some weights, and on the device, with masters there, for the others. The device's
    are updated first.

    Args:
        weights: all of them, on the device.
        on_host: whether each is on the host.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        on_host: Sequence[bool],
        precision: Precision,
        layout: HostLayout,
        **settings: Any,
    ):
        self._on_host = [*on_host]
        super().__init__(self._part(weights, True), precision, layout, **settings)
        self.here = self._part(weights, False)
        self.here_masters = [w.detach().float() if precision.master else w.detach() for w in self.here]
        self.rest = Optimizer(self.here_masters, replace(precision, master=False), **settings)
        self._begun = False

    def _part(self, of: Sequence[Tensor], on_host: bool) -> list[Tensor]:
        return [each for each, there in zip(of, self._on_host, strict=True) if there == on_host]

    def set_learning_rate(self, lr: float) -> None:
        super().set_learning_rate(lr)
        self.rest.set_learning_rate(lr)

    @torch.no_grad()
    def begin(self) -> None:
        super().begin()
        if not self._begun:  # weights may have been set until now
            self._begun = True
            for master, weight in self._copies():
                master.copy_(weight)

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Masters that are not the weights themselves, with these."""
        for master, weight in zip(self.here_masters, self.here, strict=True):
            if master.dtype != weight.dtype:
                yield master, weight.detach()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        """Update the weights, whose gradients these are."""
        assert gradients is not None
        for master, gradient in zip(self.here_masters, self._part(gradients, False), strict=True):
            master.grad = gradient.to(master.dtype)
        if self.here:
            self.rest.step()
        for master, weight in self._copies():
            weight.copy_(master)
        super().step(self._part(gradients, True))
        for master in self.here_masters:
            master.grad = None

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(master for master, _ in self._copies()), *self.rest.tensors()]
