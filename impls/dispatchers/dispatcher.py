"""The interface of dispatchers, which send tokens to the ranks that have their experts, and back.

For experts, the ranks of a pipeline stage form another grid, over the axes ep and etp (parallel folding,
arXiv 2504.14960). A rank has E / ep experts, and 1 / etp of the features of each of these. A dispatcher sends
only over these two axes, with any strategy for the other layers.

Letters: T tokens of this rank, H hidden, E experts, k experts a token, R rows that a rank's experts get (a
token has one row for each of its experts), P ranks along ep and etp together, B batch, L sequence.

Shared experts can run on a second stream, while tokens are sent to their experts and back (Megatron-LM's
--moe-shared-expert-overlap, core/transformer/moe/shared_experts.py).

The shared experts' first matmul and activation wait for the work that the computing stream has before tokens
are sent, their second matmul for its work before results come back. Backward does the same with gradients.
Under sequence parallelism, Megatron-LM gathers the shared experts' input before it puts tokens in the order
of experts. Here the first matmul gathers the input, which is kept whole
(:attr:`ExpertOptions.gathers_shared_once`).
"""

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
    """The settings of a block of experts that its dispatcher needs, in addition to the tensors' sizes.

    Attributes:
        plan: the experts of each token; with a learned router, an assumption.
        dispatcher: the dispatcher's name.
        capacity, padded: as in :class:`ExpertOptions`.
        precise_weights: whether the router's weights are in at least float32.
        aux_loss: as in :class:`ExpertOptions`.
        node_ranks: as in :class:`ExpertOptions`.
        weighs_at: ``expert_weighting_at`` of :class:`ExpertOptions`.
        kept: names of collectives whose results the block keeps for a second run.
        learned: whether the router decides, so that no rank knows before a step how many tokens it sends.
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
        """Bytes of one router weight, where an element of hidden states has ``element_bytes``."""
        return max(4, element_bytes) if self.precise_weights else element_bytes


class Counts(NamedTuple):
    """The numbers of tokens that each rank along ep and etp sends.

    Attributes:
        sent: tokens to each expert [P, E].
        met: for each ``part`` of :attr:`Dispatcher.parts`, tokens with experts in each run [P, part].
    """

    sent: np.ndarray
    met: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Dispatched:
    """The rows that a rank's experts get.

    Attributes:
        rows: rows [R, H] in the order of experts.
        weights: the router's weight of each row [R]; None: the tokens' own ranks multiply with the weights.
        lengths: the number of rows of each of this rank's experts.
        state: data that the dispatcher needs to send results back.
        held: sent and received tensors to which programs refer until the tokens are back (custom_forward of
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
        place: the place of this rank on the mesh.
        experts: E, the number of experts.
        permutation: one of PERMUTATIONS.
        node_ranks: the number of ranks of a node.
    """

    name: ClassVar[str]
    #: a description of one line, for lists
    summary: ClassVar[str] = ""
    #: the paper or code that describes the method
    source: ClassVar[str] = ""
    #: whether the sizes of messages depend on how many tokens each expert gets
    by_counts: ClassVar[bool] = True
    #: whether the dispatcher gathers the choices of all ranks, and counts each expert's tokens from these
    gathers_choices: ClassVar[bool] = False
    #: whether tokens beyond an expert's capacity are not sent
    heeds_capacity: ClassVar[bool] = True
    #: whether tokens' own ranks have a row for each expert of a token, and can multiply it with the weight
    weighs_tokens: ClassVar[bool] = False
    #: whether shared experts can run while tokens are sent, inside :meth:`sending`
    overlaps: ClassVar[bool] = False

    def __init__(self, place: Place, experts: int, permutation: str, node_ranks: int = 8):
        self.place, self.experts, self.permutation = place, experts, permutation
        self.ep, self.etp = place.size("ep"), place.size("etp")
        self.ep_rank, self.etp_rank = place.rank("ep"), place.rank("etp")
        #: the number of a rank's experts
        self.held = experts // self.ep
        #: shared experts that run while tokens are sent; None: no shared experts do
        self.beside: BesideDispatch | None = None
        #: the rows that weights multiply on the tokens' own rank: rows "sent", rows "returned", or "neither"
        self.weighted = "neither"
        #: a reused buffer for gathered tokens; None: each gather allocates memory
        self.buffer: ReusedBuffer | None = None
        # made before a step, because meters of a step use the groups' names
        self.group, self.etp_group = place.group("ep"), place.group("etp")

    @property
    def mine(self) -> slice:
        """The slice of experts that this rank has."""
        return slice(self.ep_rank * self.held, (self.ep_rank + 1) * self.held)

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of equal runs of experts; a dispatcher must know how many tokens meet each run."""
        return ()

    def sending(self) -> AbstractContextManager[None]:
        """A context to send tokens in, and in a second use back, while any shared experts run."""
        return nullcontext() if self.beside is None else self.beside.next_part()

    @abstractmethod
    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Counts | None) -> Dispatched:
        """Send tokens x [T, H] with weights [T, E] to their experts, of which ``chosen`` is the mask [T, E].

        Args:
            counts: the ranks' counts; None, where a router decides, for a dispatcher that is not
                ``by_counts`` or that ``gathers_choices``.
        """

    def to_ranks(self, rows: Tensor, state: Any) -> Tensor:
        """Experts' results (the shape of :attr:`Dispatched.rows`) as rows in the order in which they are sent
        back; under etp, each rank has a part of each result, and the parts are summed."""
        return rows

    def send_back(self, rows: Tensor, state: Any) -> Tensor:
        """Send rows of :meth:`to_ranks` to the ranks of their tokens; returns rows of this rank's tokens."""
        return rows

    @abstractmethod
    def to_tokens(self, rows: Tensor, state: Any) -> Tensor:
        """The sum [T, H] of each token's rows, for this rank's tokens, from the rows of :meth:`send_back`."""

    @abstractmethod
    def traffic(
        self, call: ExpertCall, hidden: int, tokens: int, counts: Counts, width: int
    ) -> Iterator[Traffic]:
        """Yields this rank's messages for one block, forward and backward, in closed form.

        Args:
            hidden: H.
            tokens: T.
            width: bytes of an element of hidden states.
        """


def with_backward(forward: Sequence[Traffic]) -> Iterator[Traffic]:
    """Yields each message of forward, followed by the message that its gradient needs in backward."""
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
        side: the stream on which the shared experts run.
        x: the shared experts' input [B, L, H].
        opens: the first part, from x to the arguments of ``closes``.
        closes: the second part, to a tuple of only the result [B, L, H].
    """

    def __init__(
        self, side: SideStream, x: Tensor, opens: Callable[..., Tensors], closes: Callable[..., Tensors]
    ):
        self._side, self._parts = side, [closes, opens]
        self._so_far: tuple[Tensor, ...] = (x,)

    @contextmanager
    def next_part(self) -> Iterator[None]:
        """A context to send tokens in, while the next part runs; without a next part, nothing else runs."""
        self._side.follow(self._so_far[0])
        yield
        if self._parts:
            self._so_far = self._side.run(self._parts.pop(), *self._so_far)

    def result(self) -> Tensor:
        """The shared experts' result [B, L, H], after the computing stream waits for it."""
        assert not self._parts, "a dispatcher that overlaps sends tokens out and back beside shared experts"
        self._side.wait()
        (y,) = self._so_far
        return y


def all_dispatchers() -> Mapping[str, type[Dispatcher]]:
    """Every class of dispatchers by name; plug-ins add classes by entry points of the group
    `spbench.dispatchers`."""
    return named_classes("spbench.impls.dispatchers", Dispatcher, "spbench.dispatchers")
