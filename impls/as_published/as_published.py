"""What all baselines as published have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from spbench.impls.layout import Site, Unsupported
from spbench.impls.strategies.base import Strategy


class AsPublished(Strategy):
    """A strategy whose code computes another function than the model's, as its authors ran it.

    Verification holds it to :meth:`on_one_device`, so that its gradients are proven right for what it
    computes, and shows beside that how far this is from the model.

    Attributes:
        departs: what it computes otherwise than the model, in a line.
    """

    departs: ClassVar[str]

    @abstractmethod
    def on_one_device(self) -> Strategy:
        """A strategy of one device that computes the same function as all ranks of this one together."""

    def _check_own(self, sites: Sequence[Site]) -> None:
        if self.within is not None or self.outermost is not self:
            raise Unsupported(
                f"{self.name} stands for code that was run alone", "use the method that it is named after"
            )
        super()._check_own(sites)
