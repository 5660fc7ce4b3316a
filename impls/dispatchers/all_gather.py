"""Every rank gets the tokens of all ranks, and selects the tokens of its own experts (Megatron-LM's
MoEAllGatherTokenDispatcher).

Tokens, weights and choices are gathered over ep and etp. Each rank sums its experts' results for each token.
Then a reduce-scatter adds up these sums over ranks and gives each rank its own tokens back.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spbench.impls.collectives import all_gather, all_gather_rows_into, reduce_scatter
from spbench.impls.dispatchers.dispatcher import Counts, Dispatched, Dispatcher, ExpertCall, with_backward
from spbench.impls.kernels.permutation import permute, unpermute
from spbench.impls.row_collectives import gather_flags
from spbench.impls.traffic import Traffic


class AllGather(Dispatcher):
    """Dispatches by an all-gather and a reduce-scatter over ep and etp."""

    name = "all_gather"
    summary = "all-gather of every rank's tokens, each rank takes the tokens of its experts"
    source = "Megatron-LM's MoEAllGatherTokenDispatcher"
    by_counts = False

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Counts | None) -> Dispatched:
        group = self.place.group("ep", "etp")
        buffer = self.buffer
        whole = all_gather(x, 0, group) if buffer is None else all_gather_rows_into(x, group, buffer)
        weights, chosen = all_gather(weights, 0, group), gather_flags(chosen, group)
        if self.ep > 1:
            weights, chosen = weights[:, self.mine].contiguous(), chosen[:, self.mine].contiguous()
        lengths = chosen.sum(0).cpu().numpy() if counts is None else counts.sent.sum(0)[self.mine]
        rows, row_weights, places = permute(whole, weights, chosen, int(lengths.sum()), self.permutation)
        return Dispatched(rows, row_weights, lengths.tolist(), (places, len(whole)), (whole,))

    def to_ranks(self, rows: Tensor, state: Any) -> Tensor:
        places, tokens = state
        return unpermute(rows, places, tokens, self.permutation)

    def send_back(self, rows: Tensor, state: Any) -> Tensor:
        return reduce_scatter(rows, 0, self.place.group("ep", "etp"))

    def to_tokens(self, rows: Tensor, state: Any) -> Tensor:
        return rows

    def traffic(
        self, call: ExpertCall, hidden: int, tokens: int, counts: Counts, width: int
    ) -> Iterator[Traffic]:
        axes, whole = ("ep", "etp"), tokens * self.place.size("ep", "etp")
        yield Traffic("forward", "experts of each token", "all_gather", 1, whole * call.plan.experts, axes)
        of_weights = whole * call.plan.experts * call.weight_bytes(width)
        of_tokens = whole * hidden * width
        yield from with_backward(
            [
                Traffic("forward", "tokens of all ranks", "all_gather", 1, of_tokens, axes),
                Traffic("forward", "their weights", "all_gather", 1, of_weights, axes),
                Traffic("forward", "sums over experts", "reduce_scatter", 1, of_tokens, axes),
            ]
        )
