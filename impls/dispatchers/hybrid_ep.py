"""DeepEP's successor: rows go the way of :mod:`node_deduplicated`, but every rank knows all choices before
(HybridEP: deep_ep/hybrid_ep_buffer.py and csrc/hybrid_ep/executor of DeepEP's branch hybrid-ep, commit
94a9f8f; Megatron-LM's --moe-flex-dispatcher-backend hybridep).

The choices of all ranks are gathered, T E bytes of each, so that none go with a row. Beside each row go the
weights, in float32, of all experts of the node that it is sent to, also to a rank of that node. What a rank
receives lies in a buffer of the library's, outside torch's allocator, from which the rows are put in the
order of experts: nothing refers to it as a tensor until tokens are back. Here it is one that dies before.

Letters beside those of dispatchers: N nodes, M ranks of a node along ep.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spbench.impls.dispatchers.dispatcher import Counts, Dispatched, ExpertCall
from spbench.impls.dispatchers.node_deduplicated import NodeDeduplicated, Places
from spbench.impls.kernels.permutation import permute, sent_rows
from spbench.impls.row_collectives import all_gather_rows, all_to_all_rows, gather_flags
from spbench.impls.traffic import Traffic


class HybridEP(NodeDeduplicated):
    """All-gather of choices, and all-to-alls between nodes and within them."""

    name = "hybrid_ep"
    summary = "all-gather of choices, then a row for each node, and each rank there, that a token meets"
    source = "github.com/deepseek-ai/DeepEP, branch hybrid-ep; arXiv 2603.07685"
    gathers_choices = True

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Counts | None) -> Dispatched:
        everyone = gather_flags(chosen, self.place.group("ep", "etp")).unflatten(0, (-1, len(x)))
        if counts is None:
            counts = _counted(everyone, self.parts)
        lengths, places = self._lengths(counts.met), []
        # of the ranks with this one's part of features [N, M, T, E]
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
        """Those choices, of [.., T, experts] in the order of the ranks that send, whose tokens meet one of
        these experts [rows, experts]."""
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
    """The counts of rows that each rank sends, from the choices of all ranks [P, T, E]."""
    met = [everyone.unflatten(2, (part, -1)).any(3).sum(1).cpu().numpy() for part in parts]
    return Counts(everyone.sum(1).cpu().numpy(), met)
