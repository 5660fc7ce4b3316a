"""How tokens reach the ranks that have their experts, and come back: the interface of dispatchers.

The ranks of a pipeline stage are arranged anew for experts, over the axes ep and etp (parallel folding, arXiv
2504.14960): a rank has E / ep experts, and 1 / etp of the features of each. A dispatcher sends over these
axes alone, whatever strategy is around.

Letters: T tokens of this rank, H hidden, E experts, k experts a token, R rows that a rank's experts get (a
token has one for each of its experts), P ranks along ep and etp together.

Shared experts on a stream of their own, while tokens are sent to their experts and back (Megatron-LM's
--moe-shared-expert-overlap, core/transformer/moe/shared_experts.py).

Their first matmul and activation follow what the computing stream had been given before tokens are sent,
their second matmul what it had been given before results come back. Backward does the same with their
gradients. Under sequence parallelism Megatron-LM gathers the input before tokens are put in the order of
their experts, here with the first matmul; it is kept whole (:attr:`ExpertOptions.gathers_shared_once`).

Letters: B batch, L sequence, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from spbench.impls.collectives import ReusedBuffer
from spbench.impls.discovery import named_classes
from spbench.impls.kernels.side_stream import SideStream, Tensors
from spbench.impls.place import Place
from spbench.impls.routing import RoutingPlan
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class ExpertCall:
    """What a block of experts asks of a dispatcher, beside the sizes of its site.

    Attributes:
        plan: where tokens go, or are taken to go.
        dispatcher: its name.
        capacity, padded: see :class:`ExpertOptions`.
        precise_weights: whether the router's weights are in float32 at least.
        aux_loss: see :class:`ExpertOptions`.
        node_ranks: see :class:`ExpertOptions`.
        weighs_at: see ``expert_weighting_at`` of :class:`ExpertOptions`.
        kept: the collectives whose results a second run of the block has.
        learned: whether the router decides, so that what ranks with values send is not known before.
    """

    plan: RoutingPlan
    dispatcher: str
    capacity: float | None
    padded: bool
    precise_weights: bool
    aux_loss: str
    learned: bool
    node_ranks: int
    weighs_at: str = "experts"
    kept: tuple[str, ...] = ()

    def weight_bytes(self, element_bytes: int) -> int:
        """Bytes of one of the router's weights."""
        return max(4, element_bytes) if self.precise_weights else element_bytes


class Counts(NamedTuple):
    """What each rank along ep and etp sends.

    Attributes:
        sent: tokens to each expert [P, E].
        met: for each of :attr:`Dispatcher.parts`, tokens that have experts in each run [P, part].
    """

    sent: np.ndarray
    met: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Dispatched:
    """What a rank's experts get.

    Attributes:
        rows: [R, H], by expert.
        weights: the router's, of each row [R]; None: they are multiplied where the tokens are.
        lengths: how many rows each of this rank's experts has.
        state: what the way back needs.
        held: what was sent and received, which programs refer to until the tokens are back (custom_forward of
            Megatron-LM's MoELayer).
    """

    rows: Tensor
    weights: Tensor | None
    lengths: Sequence[int]
    state: Any
    held: Sequence[Tensor] = ()


class Dispatcher(ABC):
    """Sends tokens to their experts, and back.

    Args:
        place: of this rank.
        experts: E.
        permutation: one of PERMUTATIONS.
        node_ranks: ranks of a node.
    """

    name: ClassVar[str]
    #: one line for lists
    summary: ClassVar[str] = ""
    #: where the method is described
    source: ClassVar[str] = ""
    #: whether what is sent depends on how many tokens each expert gets
    by_counts: ClassVar[bool] = True
    #: whether it learns from the choices of all ranks how many these are
    gathers_choices: ClassVar[bool] = False
    #: whether tokens beyond an expert's capacity stay where they are
    heeds_capacity: ClassVar[bool] = True
    #: whether tokens' own ranks have a row for each of their experts, to be multiplied with the weights there
    weighs_tokens: ClassVar[bool] = False
    #: whether shared experts can run beside what it sends, inside :meth:`sending`
    overlaps: ClassVar[bool] = False

    def __init__(self, place: Place, experts: int, permutation: str, node_ranks: int = 8):
        self.place, self.experts, self.permutation = place, experts, permutation
        self.ep, self.etp = place.size("ep"), place.size("etp")
        self.ep_rank, self.etp_rank = place.rank("ep"), place.rank("etp")
        #: experts of a rank
        self.held = experts // self.ep
        #: shared experts that run beside what it sends; None: there are none
        self.beside: BesideDispatch | None = None
        #: what the weights multiply on the tokens' own rank: what is "sent", or what has "returned"
        self.weighted = "neither"
        #: where gathered tokens lie, if not in memory that is made for them
        self.buffer: ReusedBuffer | None = None
        # before a step, which is metered by the names that groups have got
        self.group, self.etp_group = place.group("ep"), place.group("etp")

    @property
    def mine(self) -> slice:
        """The experts of this rank."""
        return slice(self.ep_rank * self.held, (self.ep_rank + 1) * self.held)

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of equal runs of experts for which a dispatcher must know how many tokens meet each run."""
        return ()

    def sending(self) -> AbstractContextManager[None]:
        """Inside, tokens are sent out, and in a second use back, beside what shared experts do."""
        return nullcontext() if self.beside is None else self.beside.next_part()

    @abstractmethod
    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Counts | None) -> Dispatched:
        """Tokens x [T, H] with weights [T, E] to the experts that are chosen for them, bool [T, E].

        Args:
            counts: None, where a router decides it, for a dispatcher that is not ``by_counts`` or
                ``gathers_choices``.
        """

    def to_ranks(self, rows: Tensor, state: Any) -> Tensor:
        """What experts return, of the shape of :attr:`Dispatched.rows`, in the order in which it is sent;
        under etp it is a part of a sum, which is summed."""
        return rows

    def send_back(self, rows: Tensor, state: Any) -> Tensor:
        """The results of :meth:`to_ranks`, on the ranks whose tokens they are of."""
        return rows

    @abstractmethod
    def to_tokens(self, rows: Tensor, state: Any) -> Tensor:
        """The sum [T, H] over the experts of each of this rank's tokens, from :meth:`send_back`."""

    @abstractmethod
    def traffic(
        self, call: ExpertCall, hidden: int, tokens: int, counts: Counts, width: int
    ) -> Iterator[Traffic]:
        """What this rank sends for one block, forward and backward, in closed form; nothing along one rank.

        Args:
            hidden: H.
            tokens: T.
            width: bytes of an element of hidden states.
        """


def with_backward(forward: Sequence[Traffic]) -> Iterator[Traffic]:
    """Entries of forward, and what their gradients send."""
    transposed = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}
    for entry in forward:
        yield entry
        back = transposed[entry.collective]
        yield Traffic(
            "backward", f"gradient of {entry.purpose}", back, entry.count, entry.payload_bytes, entry.axes
        )


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


def all_dispatchers() -> Mapping[str, type[Dispatcher]]:
    """Every dispatcher of tokens to experts by name; plug-ins add theirs by entry points of the group
    `spbench.dispatchers`."""
    return named_classes("spbench.impls.dispatchers", Dispatcher, "spbench.dispatchers")
