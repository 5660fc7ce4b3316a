"""DeepEP's successor HybridEP: rows go the way of :mod:`node_deduplicated`, but every rank first gathers all
choices (deep_ep/hybrid_ep_buffer.py and csrc/hybrid_ep/executor of DeepEP's branch hybrid-ep, commit 94a9f8f;
Megatron-LM's --moe-flex-dispatcher-backend hybridep).

The choices of all ranks are gathered, T E bytes from each rank, so no choices travel with a row. Each row
travels with the float32 weights of all experts of its destination node, also within that node. HybridEP
receives rows in its own buffer, outside torch's allocator, from which the rows are put in the order of
experts. No tensor refers to the buffer until tokens are back; here a tensor that is freed early replaces it.

Letters, in addition to those of dispatchers: N nodes, M ranks of a node along ep.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from spbench.impls.dispatchers.dispatcher import Counts, Dispatched, ExpertCall
from spbench.impls.dispatchers.node_deduplicated import NodeDeduplicated, Places
from spbench.impls.kernels.permutation import permute, sent_rows
from spbench.impls.row_collectives import all_gather_rows, all_to_all_rows, gather_flags
from spbench.impls.traffic import Traffic


class HybridEP(NodeDeduplicated):
    """Dispatches by an all-gather of choices, and all-to-alls between nodes and within nodes."""

    name = "hybrid_ep"
    summary = "all-gather of choices, then a row for each node, and each rank there, that a token meets"
    source = "github.com/deepseek-ai/DeepEP, branch hybrid-ep; arXiv 2603.07685"
    gathers_choices = True

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Counts | None) -> Dispatched:
        everyone = gather_flags(chosen, self.place.group("ep", "etp")).unflatten(0, (-1, len(x)))
        if counts is None:
            counts = _counted(everyone, self.parts)
        lengths, places = self._lengths(counts.met), []
        # the choices [N, M, T, E] of ranks that have the same part of experts' features as this rank
        of_peers = everyone[self.etp_rank :: self.etp].unflatten(0, (self.nodes, self.on_node))
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        with self.sending():
            if (between := lengths.between) is not None:
                meets = chosen.unflatten(1, (self.nodes, -1)).any(2)
                token, node = self._rows_of(meets, sum(between.sent))
                of_node = weights.unflatten(1, (self.nodes, -1))[token, node]
                places.append(Places(token, len(x)))
                x = all_to_all_rows(sent_rows(x, token), between.sent, between.received, self.between)
                weights = all_to_all_rows(of_node, between.sent, between.received, self.between)
                chosen = self._arrived(
                    of_peers[:, self.local].unflatten(2, (self.nodes, -1))[:, :, self.node], len(x)
                )
            meets = chosen.unflatten(1, (self.on_node, -1)).any(2)
            token, _ = self._rows_of(meets, sum(lengths.within.sent))
            places.append(Places(token, len(x)))
            hop = lengths.within
            x = all_to_all_rows(sent_rows(x, token), hop.sent, hop.received, self.within)
            weights = all_to_all_rows(weights[token], hop.sent, hop.received, self.within)
        first = self.local * self.held
        weights = weights[:, first : first + self.held]
        chosen = self._arrived(of_peers[..., self.mine].transpose(0, 1), len(x))
        x = all_gather_rows(x, lengths.gathered, self.etp_group)
        weights = all_gather_rows(weights.contiguous(), lengths.gathered, self.etp_group)
        chosen = all_gather_rows(chosen, lengths.gathered, self.etp_group)
        of_experts = counts.sent.sum(0)[self.mine]
        rows, row_weights, copied = permute(x, weights, chosen, int(of_experts.sum()), self.permutation)
        return Dispatched(rows, row_weights, of_experts.tolist(), (lengths, places, (copied, len(x))))

    def _arrived(self, choices: Tensor, rows: int) -> Tensor:
        """From choices [.., T, experts], in the order of the ranks that send, those of tokens that meet at
        least one of these experts [rows, experts]."""
        choices = choices.flatten(0, -2)
        order = choices.any(1).argsort(descending=True, stable=True)[:rows]
        return choices[order]

    def traffic(
        self, call: ExpertCall, hidden: int, tokens: int, counts: Counts, width: int
    ) -> Iterator[Traffic]:
        whole = tokens * self.place.size("ep", "etp")
        if whole > tokens:
            told = whole * self.experts
            yield Traffic("forward", "experts of each token", "all_gather", 1, told, ("ep", "etp"))
        of_node, of_weight = self.experts // self.nodes, max(4, width)
        yield from self.hops(counts, hidden * width, (of_node, of_node), of_weight, choices=False)


def _counted(everyone: Tensor, parts: tuple[int, ...]) -> Counts:
    """The counts of tokens that each rank sends, from the choices of all ranks [P, T, E]."""
    met = [everyone.unflatten(2, (part, -1)).any(3).sum(1).cpu().numpy() for part in parts]
    return Counts(everyone.sum(1).cpu().numpy(), met)
