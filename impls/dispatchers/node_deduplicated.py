"""Each token goes once to each node that has some of its experts, and once to each rank there (DeepEP, arXiv
2603.07685).

A token meets a node or rank that has at least one of its experts. An all-to-all between nodes takes a token
to the rank of the same number on each node that the token meets. An all-to-all within the node takes the
token on to the ranks that it meets, with its weights for their experts. If all ranks that share experts are
on one node, only the second is needed. A rank copies rows to its experts and sums the experts' results before
it sends these back. Rows are sent without a copy, and summed as they come back (:func:`sent_rows`). DeepEP's
kernels overlap both hops; here the hops are two collectives.

With a row, DeepEP sends k indices and weights; here, choices and weights of all experts of the node or rank.

Letters, in addition to those of dispatchers: N nodes, M ranks of a node along ep.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spbench.impls.dispatchers.dispatcher import Counts, Dispatched, Dispatcher, ExpertCall
from spbench.impls.kernels.permutation import permute, sent_rows, summed_rows, unpermute
from spbench.impls.layout import Unsupported
from spbench.impls.place import Place
from spbench.impls.row_collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from spbench.impls.traffic import Traffic


class _Hop(NamedTuple):
    """The numbers of rows of one all-to-all, sent to and received from each rank of its group."""

    sent: list[int]
    received: list[int]


class Places(NamedTuple):
    """The token number of each row, and the number of all tokens."""

    rows: Tensor
    tokens: int


class _Lengths(NamedTuple):
    """Attributes:
    between: the all-to-all between nodes; None: there is only one node.
    within: the all-to-all within the node.
    gathered: the number of rows that each rank along etp has received.
    """

    between: _Hop | None
    within: _Hop
    gathered: list[int]


class NodeDeduplicated(Dispatcher):
    """All-to-alls between nodes, then within nodes, of a row for each node or rank that a token meets."""

    name = "node_deduplicated"
    summary = "all-to-alls of a row for each node, and each rank there, that a token meets"
    source = "github.com/deepseek-ai/DeepEP; arXiv 2603.07685"
    overlaps = True
    heeds_capacity = False

    def __init__(self, place: Place, experts: int, permutation: str, node_ranks: int = 8):
        super().__init__(place, experts, permutation, node_ranks)
        along_ep = max(1, node_ranks // self.etp)
        if self.ep > along_ep and self.ep % along_ep:
            nodes = f"node_ranks {node_ranks} has {along_ep} along ep, which do not divide ep {self.ep}"
            raise Unsupported(nodes, "set model_options.node_ranks to the ranks of a node")
        #: M, ranks of a node along ep, and N, nodes
        self.on_node = along_ep if self.ep % along_ep == 0 else self.ep
        self.nodes = self.ep // self.on_node
        self.node, self.local = divmod(self.ep_rank, self.on_node)
        self.within = place.subgroup("ep", size=self.on_node)
        self.between = place.subgroup("ep", size=self.on_node, across=True)

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.ep, self.nodes)

    def _lengths(self, met: Sequence[np.ndarray]) -> _Lengths:
        """The numbers of rows of both hops, from :attr:`Counts.met`: tokens that meet ranks, and nodes."""
        by_rank, by_node = (each.reshape(self.ep, self.etp, -1) for each in met)
        # tokens from the ranks of all nodes to each rank of this node
        here = by_rank.reshape(self.nodes, self.on_node, self.etp, self.nodes, self.on_node)[
            :, :, :, self.node
        ]
        own = here[:, self.local, self.etp_rank].sum(0)
        gathered = here[..., self.local].sum((0, 1))
        within = _Hop(own.tolist(), here[:, :, self.etp_rank, self.local].sum(0).tolist())
        if self.nodes == 1:
            return _Lengths(None, within, gathered.tolist())
        peers = by_node.reshape(self.nodes, self.on_node, self.etp, self.nodes)[:, self.local, self.etp_rank]
        return _Lengths(
            _Hop(peers[self.node].tolist(), peers[:, self.node].tolist()), within, gathered.tolist()
        )

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Counts | None) -> Dispatched:
        assert counts is not None
        lengths, places = self._lengths(counts.met), []
        with self.sending():
            if (between := lengths.between) is not None:
                x, weights, chosen, place = self._hop(x, weights, chosen, self.nodes, between, self.between)
                places.append(place)
            x, weights, chosen, place = self._hop(
                x, weights, chosen, self.on_node, lengths.within, self.within
            )
            places.append(place)
        received = x
        x = all_gather_rows(x, lengths.gathered, self.etp_group)
        weights = all_gather_rows(weights, lengths.gathered, self.etp_group)
        chosen = all_gather_rows(chosen, lengths.gathered, self.etp_group)
        of_experts = counts.sent.sum(0)[self.mine]
        rows, row_weights, copied = permute(x, weights, chosen, int(of_experts.sum()), self.permutation)
        state = lengths, places, (copied, len(x))
        return Dispatched(rows, row_weights, of_experts.tolist(), state, (received,))

    def _hop(
        self, x: Tensor, weights: Tensor, chosen: Tensor, parts: int, hop: _Hop, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Places]:
        """Send rows x [T, H] to those of ``parts`` ranks that they meet, with the weights and choices, from
        [T, E], for these ranks' experts. Returns the received three, and the places of the sent rows."""
        meets = chosen.unflatten(1, (parts, -1)).any(2)
        token, part = self._rows_of(meets, sum(hop.sent))
        of_part = weights.unflatten(1, (parts, -1))[token, part]
        choices = chosen.unflatten(1, (parts, -1))[token, part]
        return (
            all_to_all_rows(sent_rows(x, token), hop.sent, hop.received, group),
            all_to_all_rows(of_part, hop.sent, hop.received, group),
            all_to_all_rows(choices, hop.sent, hop.received, group),
            Places(token, len(x)),
        )

    def _rows_of(self, meets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The token and the part of each row [rows], sorted by part and token, from a mask [T, parts]."""
        order = meets.mT.reshape(-1).argsort(descending=True, stable=True)[:rows]
        return order % len(meets), torch.div(order, len(meets), rounding_mode="floor")

    def to_ranks(self, rows: Tensor, state: Any) -> Tensor:
        lengths, _, (copied, tokens) = state
        rows = unpermute(rows, copied, tokens, self.permutation)
        return reduce_scatter_rows(rows, lengths.gathered, self.etp_group)

    def send_back(self, rows: Tensor, state: Any) -> Tensor:
        lengths, places, _ = state
        with self.sending():
            rows = all_to_all_rows(rows, lengths.within.received, lengths.within.sent, self.within)
            if lengths.between is None:
                return rows
            rows = summed_rows(rows, *places[1])
            return all_to_all_rows(rows, lengths.between.received, lengths.between.sent, self.between)

    def to_tokens(self, rows: Tensor, state: Any) -> Tensor:
        _, places, _ = state
        return summed_rows(rows, *places[0])

    def traffic(
        self, call: ExpertCall, hidden: int, tokens: int, counts: Counts, width: int
    ) -> Iterator[Traffic]:
        if self.place.size("ep", "etp") > 1:
            told = (counts.sent.size + sum(each.size for each in counts.met)) * 8
            yield Traffic("forward", "tokens of each expert", "all_gather", 1, told, ("ep", "etp"))
        weights = self.experts // self.nodes, self.held
        yield from self.hops(counts, hidden * width, weights, call.weight_bytes(width), choices=True)

    def hops(
        self, counts: Counts, row: int, weights: tuple[int, int], of_weight: int, *, choices: bool
    ) -> Iterator[Traffic]:
        """Yields the messages between nodes, within the node and over etp, of rows with ``row`` bytes. With a
        row go ``weights`` (how many between nodes, and within) of ``of_weight`` bytes each and, if
        ``choices``, a byte for each of these weights."""
        lengths = self._lengths(counts.met)
        hops = [
            ("between nodes", lengths.between, self.nodes),
            ("within the node", lengths.within, self.on_node),
        ]
        for (where, hop, ranks), experts in zip(hops, weights, strict=True):
            if hop is not None:
                yield from self._of_hop(
                    where, hop, row, experts * of_weight, experts if choices else 0, ranks
                )
        whole = len(lengths.gathered) * max(lengths.gathered)
        for phase, collective, purpose, nbytes in (
            ("forward", "all_gather", "tokens of experts' features", row),
            ("forward", "all_gather", "their weights", self.held * of_weight),
            ("forward", "all_gather", "their experts", self.held),
            ("forward", "reduce_scatter", "sums over experts' features", row),
            ("backward", "all_gather", "gradient of these sums", row),
            ("backward", "reduce_scatter", "gradient of weights", self.held * of_weight),
            ("backward", "reduce_scatter", "gradient of tokens of experts' features", row),
        ):
            yield Traffic(phase, purpose, collective, 1, whole * nbytes, ("etp",))

    def _of_hop(
        self, where: str, hop: _Hop, row: int, weights: int, choices: int, ranks: int
    ) -> Iterator[Traffic]:
        """Yields a hop's messages; a row, its weights and its choices have these numbers of bytes."""
        out, back = sum(hop.sent), sum(hop.received)
        for phase, n, purpose, nbytes in (
            ("forward", out, "tokens to experts", row),
            ("forward", out, "their weights", weights),
            ("forward", out, "their experts", choices),
            ("forward", back, "tokens from experts", row),
            ("backward", out, "gradient of tokens from experts", row),
            ("backward", back, "gradient of weights", weights),
            ("backward", back, "gradient of tokens to experts", row),
        ):
            if not nbytes:
                continue
            run = None if ranks == self.ep else ranks
            yield Traffic(phase, f"{purpose}, {where}", "all_to_all", 1, n * nbytes, ("ep",), run)
