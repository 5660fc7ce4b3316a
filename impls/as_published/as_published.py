"""The base class of baselines as published."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from spbench.impls.layout import Site, Unsupported
from spbench.impls.strategies.base import Strategy


class AsPublished(Strategy):
    """A strategy whose code computes another function than the model's, as its authors ran it.

    Verification compares the baseline with :meth:`on_one_device`, so that its gradients are proven right for
    the function that it computes, and also shows how far this function is from the model's.

    Attributes:
        departs: one line that says how the baseline's function differs from the model's.
    """

    departs: ClassVar[str]

    @abstractmethod
    def on_one_device(self) -> Strategy:
        """A strategy of one device that computes the same function as all ranks of this baseline."""

    def _check_own(self, sites: Sequence[Site]) -> None:
        if self.within is not None or self.outermost is not self:
            raise Unsupported(
                f"{self.name} stands for code that was run alone", "use the method that it is named after"
            )
        super()._check_own(sites)
