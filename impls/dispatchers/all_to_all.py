"""Each token goes to the ranks of its experts, once for each expert (GShard, arXiv 2006.16668; Megatron-LM's
MoEAlltoAllTokenDispatcher).

Rows are put in the order of experts, and two all-to-alls over ep send the rows and their weights there. Over
etp, rows are gathered and results reduce-scattered, because the ranks along etp have features of the same
experts. A rank with several experts sorts the rows from each rank by expert.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spbench.impls.dispatchers.dispatcher import Counts, Dispatched, Dispatcher, ExpertCall
from spbench.impls.kernels.permutation import back_by_index, by_index, permute, sort_chunks, unpermute
from spbench.impls.row_collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from spbench.impls.traffic import Traffic


class _Lengths(NamedTuple):
    """The numbers of rows by source and destination.

    Attributes:
        sent: rows to each rank along ep.
        received: rows from each rank along ep.
        gathered: rows that each rank along etp received.
        chunks: rows from each rank along etp and ep for each of this rank's experts [etp, ep, experts].
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    chunks: np.ndarray


class _State(NamedTuple):
    places: Tensor
    tokens: int
    lengths: _Lengths
    weights: Tensor | None
    order: Tensor | None


class AllToAll(Dispatcher):
    """Dispatches by all-to-alls over ep, and an all-gather and a reduce-scatter over etp."""

    name = "all_to_all"
    summary = "all-to-all of a row for each expert of each token"
    source = "arXiv 2006.16668"
    overlaps = weighs_tokens = True

    def _lengths(self, sent: np.ndarray) -> _Lengths:
        by_rank = sent.reshape(self.ep, self.etp, self.experts)
        own = by_rank[self.ep_rank, self.etp_rank].reshape(self.ep, self.held).sum(1)
        chunks = by_rank[:, :, self.mine].transpose(1, 0, 2)
        received = chunks[self.etp_rank].sum(1)
        return _Lengths(own.tolist(), received.tolist(), chunks.sum((1, 2)).tolist(), chunks)

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Counts | None) -> Dispatched:
        assert counts is not None
        lengths = self._lengths(counts.sent)
        own, own_weights, places = permute(x, weights, chosen, sum(lengths.sent), self.permutation)
        if self.weighted == "sent":
            own = _times(own, own_weights)
        with self.sending():
            received = all_to_all_rows(own, lengths.sent, lengths.received, self.group)
        rows = all_gather_rows(received, lengths.gathered, self.etp_group)
        row_weights, order, travel = None, None, self.weighted == "neither"
        if travel:
            row_weights = all_to_all_rows(own_weights, lengths.sent, lengths.received, self.group)
            row_weights = all_gather_rows(row_weights, lengths.gathered, self.etp_group)
        if self.permutation == "indexed":
            rows, order = by_index(rows, *self._to_experts(lengths))
            row_weights = None if row_weights is None else row_weights[order]
        elif self._sorts:
            rows, ordered = sort_chunks(rows, row_weights, *self._to_experts(lengths), self.permutation)
            row_weights = ordered if travel else None
        per_expert = lengths.chunks.sum((0, 1)).tolist()
        returned = own_weights if self.weighted == "returned" else None
        state = _State(places, len(x), lengths, returned, order)
        return Dispatched(rows, row_weights, per_expert, state, (own, received))

    def to_ranks(self, rows: Tensor, state: Any) -> Tensor:
        lengths: _Lengths = state.lengths
        if state.order is not None:
            rows = back_by_index(rows, state.order)
        elif self._sorts:
            sizes, order = self._from_experts(lengths)
            rows, _ = sort_chunks(rows, None, sizes, order, self.permutation)
        return reduce_scatter_rows(rows, lengths.gathered, self.etp_group)

    def send_back(self, rows: Tensor, state: Any) -> Tensor:
        lengths: _Lengths = state.lengths
        with self.sending():
            return all_to_all_rows(rows, lengths.received, lengths.sent, self.group)

    def to_tokens(self, rows: Tensor, state: Any) -> Tensor:
        if state.weights is not None:
            rows = _times(rows, state.weights)
        return unpermute(rows, state.places, state.tokens, self.permutation)

    @property
    def _sorts(self) -> bool:
        """Whether this rank must sort rows, because rows come from several ranks for several experts."""
        return self.held > 1 and self.ep * self.etp > 1

    def _to_experts(self, lengths: _Lengths) -> tuple[list[int], list[int]]:
        """The rows of each chunk in order of arrival, and the order of chunks that sorts them by expert."""
        order = np.arange(lengths.chunks.size).reshape(-1, self.held).T
        return lengths.chunks.ravel().tolist(), order.ravel().tolist()

    def _from_experts(self, lengths: _Lengths) -> tuple[list[int], list[int]]:
        """The rows of each chunk sorted by expert, and the order of chunks that restores their arrival."""
        sizes = lengths.chunks.reshape(-1, self.held).T
        order = np.arange(sizes.size).reshape(self.held, -1).T
        return sizes.ravel().tolist(), order.ravel().tolist()

    def traffic(
        self, call: ExpertCall, hidden: int, tokens: int, counts: Counts, width: int
    ) -> Iterator[Traffic]:
        lengths = self._lengths(counts.sent)
        if self.place.size("ep", "etp") > 1 and not call.padded:
            told = counts.sent.size * 8
            yield Traffic("forward", "tokens of each expert", "all_gather", 1, told, ("ep", "etp"))
        of_weight, row = 0 if call.weighs_at == "tokens" else call.weight_bytes(width), hidden * width
        # an all-to-all's payload is its input; of a gradient or the way back, that is the forward output
        out, back = sum(lengths.sent), sum(lengths.received)
        for phase, n, purpose, nbytes in (
            ("forward", out, "tokens to experts", row),
            ("forward", out, "their weights", of_weight),
            ("forward", back, "tokens from experts", row),
            ("backward", out, "gradient of tokens from experts", row),
            ("backward", back, "gradient of weights", of_weight),
            ("backward", back, "gradient of tokens to experts", row),
        ):
            if nbytes:
                yield Traffic(phase, purpose, "all_to_all", 1, n * nbytes, ("ep",))
        whole = len(lengths.gathered) * max(lengths.gathered)
        for phase, collective, purpose, nbytes in (
            ("forward", "all_gather", "tokens of experts' features", row),
            ("forward", "all_gather", "their weights", of_weight),
            ("forward", "reduce_scatter", "sums over experts' features", row),
            ("backward", "all_gather", "gradient of these sums", row),
            ("backward", "reduce_scatter", "gradient of weights", of_weight),
            ("backward", "reduce_scatter", "gradient of tokens of experts' features", row),
        ):
            if nbytes:
                yield Traffic(phase, purpose, collective, 1, whole * nbytes, ("etp",))


def _times(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [R, H] times their weights [R], computed in at least float32 as in torchtitan's MoE."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(dtype) * weights.to(dtype)[:, None]).to(rows.dtype)
