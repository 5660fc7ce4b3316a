"""Packed documents and windows in verification: attention by a mask of all pairs, as the oracle computes it,
and whether documents see each other.

The oracle makes the mask from the definition alone: which document each position is of, and how far apart two
positions are. It shares nothing with how strategies find what their ranks see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spbench.bench.measure.verify.discrepancy import Discrepancy, discrepancies
from spbench.impls.attended import Attended

if TYPE_CHECKING:
    from spbench.bench.measure.verify.verified_run import VerifiedRun


def document_of_positions(attended: Attended, length: int) -> Tensor:
    """Which document each position of a sequence is of [L]."""
    names = [number for number, n in enumerate(attended.documents or (length,)) for _ in range(n)]
    return torch.tensor(names)


def seen_pairs(attended: Attended, length: int) -> Tensor:
    """Whether a query (rows) sees a key (columns) [L, L]."""
    document, place = document_of_positions(attended, length), torch.arange(length)
    back = place[:, None] - place
    seen = (back >= 0) & (document[:, None] == document)
    return seen if attended.window is None else seen & (back < attended.window)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, attended: Attended, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention under the mask, by all scores: q [B, Z, L, A], k, v [B, G, L, A] -> [B, Z, L, A].
    ``sinks`` [Z] are one more column of the scores, whose probability is dropped."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    hidden = ~seen_pairs(attended, q.shape[2]).to(q.device)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def check_documents(whole: VerifiedRun, checked: VerifiedRun) -> Iterator[tuple[str, Discrepancy]]:
    """Where the outputs of a document change with the inputs of its neighbours, in two more forwards; nothing
    for a model whose sequences are not packed."""
    strategy, part = checked.strategy, checked.part
    attended = strategy.packed
    if len(attended.documents) < 2:
        return
    of_positions = document_of_positions(attended, sum(attended.documents)) % 2
    for changed in range(2):
        inputs = {}
        for name, x in whole.inputs.items():
            dim, values = part.sequence_dims[name], x.detach()
            if isinstance(dim, int):
                other = values + 1 if x.is_floating_point() else (values + 1) % (values.max() + 1)
                where = (of_positions == changed).to(x.device)
                values = torch.where(where.view(-1, *[1] * (x.ndim - 1 - dim)), other, values)
            inputs[name] = strategy.shard(values, dim).to(checked.inputs[name].dtype).clone()
        with torch.no_grad():
            outputs = checked.module(inputs)
        others = strategy.shard(of_positions != changed, 0).nonzero().flatten()
        before, after = {}, {}
        for name, x in outputs.items():
            if isinstance(dim := part.output_dims[name], int):
                key, index = f"output {name} of other documents", others.to(x.device)
                before[key] = checked.outputs[name].detach().index_select(dim, index)
                after[key] = x.index_select(dim, index)
        yield from discrepancies(before, after).items()
