"""Shared experts on a stream of their own, while tokens are sent to their experts and back (Megatron-LM's
--moe-shared-expert-overlap, core/transformer/moe/shared_experts.py).

Their first matmul and activation follow what the computing stream had been given before tokens are sent,
their second matmul what it had been given before results come back. Backward does the same with their
gradients. Under sequence parallelism Megatron-LM gathers the input before tokens are put in the order of
their experts, here with the first matmul; it is kept whole (:attr:`ExpertOptions.gathers_shared_once`).

Letters: B batch, L sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from spbench.impls.kernels.side_stream import SideStream, Tensors


class BesideDispatch:
    """One run of the shared experts of a layer, in two parts.

    Args:
        x: their input [B, L, H].
        opens: x -> what ``closes`` takes.
        closes: -> their result [B, L, H], alone in a tuple.
    """

    def __init__(
        self, side: SideStream, x: Tensor, opens: Callable[..., Tensors], closes: Callable[..., Tensors]
    ):
        self._side, self._parts = side, [closes, opens]
        self._so_far: tuple[Tensor, ...] = (x,)

    @contextmanager
    def next_part(self) -> Iterator[None]:
        """Inside, tokens are sent, beside which the next part runs; parts after the last do nothing."""
        self._side.follow(self._so_far[0])
        yield
        if self._parts:
            self._so_far = self._side.run(self._parts.pop(), *self._so_far)

    def result(self) -> Tensor:
        """[B, L, H], for which the computing stream waits."""
        assert not self._parts, "a dispatcher that overlaps sends tokens out and back beside shared experts"
        self._side.wait()
        (y,) = self._so_far
        return y
