"""Sequence tiles of an MLP, and of head and loss (ALST, arXiv 2506.13996; DeepSpeed's TiledMLP and
TiledFusedLogitsLoss of runtime/sequence_parallel/ulysses_sp.py; FPDT_FFN and FPDT_LogitsLoss of
sequence/fpdt_layer.py).

For autograd all tiles together are one function of the input and of the weights. So each weight gets one
whole gradient, and a backend acts once on each gradient (a bucket, a reduce-scatter).

Shape letters: B batch, L sequence (this rank's part of it), T = B L tokens of this rank, n tokens of a tile,
H hidden, V rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.host_copies import from_pageable_, pageable_empty_like, to_pageable_
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.rings import wait_for_device
from spbench.impls.tiles import Tiling

#: a function of a tile [1, n, H] that returns [1, n, H]
Run = Callable[[Tensor], Tensor]
#: a function of a tile [1, n, H], the head's weight [V, H] and labels [1, n] that returns token losses [1, n]
RunLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


class WeightsOf:
    """The current weights of a module, which a backend may have replaced: FSDP's tensors are not parameters
    of the module, or other tensors than those that the module was built with."""

    def __init__(self, module: nn.Module):
        self._places = [
            (owner, name) for owner in module.modules() for name, _ in owner.named_parameters(recurse=False)
        ]

    def now(self) -> list[Tensor]:
        """The module's current weights, in the order of its parameters."""
        return [getattr(owner, name) for owner, name in self._places]


def in_tiles(run: Run, weights: Sequence[Tensor], x: Tensor, tiling: Tiling) -> Tensor:
    """``run(x)`` [B, L, H] of x [B, L, H], computed tile after tile. Only x is kept; backward runs a tile
    again and makes the tile's gradients, then goes on to the next tile.

    Args:
        weights: the weights that ``run`` uses.
    """
    tokens = x.reshape(1, -1, x.shape[-1])
    lengths = tiling.lengths(tokens.shape[1])
    result: Tensor = _Tiles.apply(run, lengths, tiling.precise, tokens, *weights)
    return result.view(x.shape)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, lengths: Sequence[int], precise: bool, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.lengths, ctx.precise, ctx.weights = run, lengths, precise, weights
        y = torch.empty_like(x)
        for tile in _each(lengths):
            y[:, tile].copy_(run(x[:, tile]))
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        d_x, sums = torch.empty_like(x), WeightGradients(ctx.weights, precise=ctx.precise)
        for tile in _each(ctx.lengths):
            d_x[:, tile].copy_(_gradients(ctx.run, x[:, tile], ctx.weights, d_y[:, tile], sums))
        return None, None, None, d_x, *sums.whole()


def _gradients(
    run: Run, tile: Tensor, weights: Sequence[Tensor], d_y: Tensor, sums: WeightGradients
) -> Tensor:
    """The gradient [1, n, H] of a tile, whose graph is freed at once; gradients of weights go to ``sums``."""
    tile = tile.detach().requires_grad_()
    with torch.enable_grad():
        y = run(tile)
    trained = [weight for weight in weights if weight.requires_grad]
    # autograd.grad, because Tensor.backward would fill .grad and call hooks of the weights
    d_tile, *d_weights = torch.autograd.grad(y, [tile, *trained], d_y)
    rest = iter(d_weights)
    sums.add([next(rest) if weight.requires_grad else None for weight in weights])
    return d_tile


def _each(lengths: Sequence[int], losses: list[Tensor] | None = None) -> Iterator[slice]:
    """The slice of positions of each tile. A trace may skip tiles of equal length, but not the first one,
    which begins the sums (:func:`keyed_steps`).

    Args:
        losses: the list to which each tile appends its losses."""
    keys = [(i == 0, length) for i, length in enumerate(lengths)]
    for i in keyed_steps(len(lengths), keys.__getitem__, backward_within=True, kept=losses):
        yield slice(i * lengths[0], i * lengths[0] + lengths[i])


class WeightGradients:
    """The sums of the weights' gradients over tiles, in their dtype or, if ``precise``, at least float32."""

    def __init__(self, weights: Sequence[Tensor], *, precise: bool = False):
        self.weights, self.precise = weights, precise
        self.sums: list[Tensor | None] = [None] * len(weights)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one tile, in the weights' order and shapes; a frozen weight's is None."""
        for i, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            if gradient is None:
                continue
            so_far, elsewhere = self.sums[i], getattr(weight, "main_grad", None) is not None
            if so_far is None and self.precise and not elsewhere:
                so_far = self.sums[i] = torch.zeros_like(gradient, dtype=state_dtype(gradient.dtype))
            if so_far is None:
                self.sums[i] = gradient
            elif not elsewhere:  # else the matmuls have added the gradient to main_grad
                so_far.add_(gradient)

    def whole(self) -> list[Tensor | None]:
        """The sums over all tiles, in the dtypes of the weights."""
        each = zip(self.weights, self.sums, strict=True)
        return [None if total is None else total.to(weight.dtype) for weight, total in each]


def loss_in_tiles(
    run: RunLoss, weight: Tensor, x: Tensor, labels: Tensor, loss_weights: Tensor, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    """The weighted sum of token losses, a scalar, and each token's loss [B, L], computed tile after tile from
    x [B, L, H], labels [B, L] and the tokens' weights [B, L].

    Forward also makes the gradients of x and of the head's weight, which backward multiplies by the sum's
    gradient, as Liger's fused linear cross entropy does. So no tile runs twice, and the head's weight has a
    gradient from forward on; a loss scale multiplies that gradient after rounding. Without
    ``backward_at_once`` backward runs each tile again, from a copy of x in pageable memory of the host."""
    lengths = tiling.lengths(labels.numel())
    tokens = x.reshape(1, -1, x.shape[-1])
    flat = (each.reshape(1, -1) for each in (labels, loss_weights))
    tiles = _LossTiles if tiling.backward_at_once else _LossTilesAgain
    loss, token_loss = tiles.apply(run, lengths, torch.is_grad_enabled(), tokens, weight, *flat)
    return loss, token_loss.view(labels.shape)


class _LossTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: RunLoss, lengths: Sequence[int], learns: bool, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, weight, labels, loss_weights = tensors
        losses: list[Tensor] = []
        sums = WeightGradients([leaf := weight.detach().requires_grad_(weight.requires_grad)])
        d_x = torch.empty_like(x) if learns else None
        for tile in _each(lengths, losses):
            if d_x is None:
                losses.append(run(x[:, tile], weight, labels[:, tile]))
            else:
                given = x[:, tile], leaf, labels[:, tile], loss_weights[:, tile]
                d_x[:, tile].copy_(_loss_gradients(run, given, sums, losses))
                del given
        token_loss = torch.cat(losses, 1)
        ctx.mark_non_differentiable(token_loss)
        if d_x is not None:
            of_weights = token_loss if ctx.needs_input_grad[-1] else None
            ctx.save_for_backward(d_x, *sums.sums, of_weights)
        return (token_loss * loss_weights).sum(), token_loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight, token_loss = ctx.saved_tensors
        of_weights = None if token_loss is None else token_loss * d_loss
        d_head = None if d_weight is None else d_weight.mul_(d_loss)
        return None, None, None, d_x.mul_(d_loss), d_head, None, of_weights


class _LossTilesAgain(torch.autograd.Function):
    """The loss in tiles of :func:`loss_in_tiles` where backward runs each tile again (FPDT_LogitsLoss)."""

    @staticmethod
    def forward(
        ctx: Any, run: RunLoss, lengths: Sequence[int], learns: bool, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, weight, labels, loss_weights = tensors
        losses: list[Tensor] = []
        for tile in _each(lengths, losses):
            losses.append(run(x[:, tile], weight, labels[:, tile]))
        token_loss = torch.cat(losses, 1)
        ctx.mark_non_differentiable(token_loss)
        if learns:
            to_pageable_(host := pageable_empty_like(x), x)
            wait_for_device(x)
            ctx.save_for_backward(host, weight, labels, loss_weights, token_loss)
            ctx.run, ctx.lengths = run, lengths
        return (token_loss * loss_weights).sum(), token_loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        host, weight, labels, loss_weights, token_loss = ctx.saved_tensors
        leaf = weight.detach().requires_grad_(ctx.needs_input_grad[4])
        sums, scaled = WeightGradients([leaf], precise=True), loss_weights * d_loss
        d_x = torch.empty(host.shape, dtype=host.dtype, device=d_loss.device)
        for tile in _each(ctx.lengths):
            from_pageable_(x := torch.empty_like(d_x[:, tile]), host[:, tile])
            wait_for_device(x)
            given = x, leaf, labels[:, tile], scaled[:, tile]
            d_x[:, tile].copy_(_loss_gradients(ctx.run, given, sums, []))
            del x, given
        of_weights = token_loss * d_loss if ctx.needs_input_grad[-1] else None
        return None, None, None, d_x, *sums.whole(), None, of_weights


def _loss_gradients(
    run: RunLoss, given: Sequence[Tensor], sums: WeightGradients, losses: list[Tensor]
) -> Tensor:
    """The gradient [1, n, H] of a tile, from the tile, the head's weight, labels and the tokens' weights in
    ``given``; the weight's goes to ``sums``, token losses go to ``losses``."""
    tile, leaf, labels, loss_weights = given
    tile = tile.detach().requires_grad_()
    with torch.enable_grad():
        token_loss = run(tile, leaf, labels)
    learning = [tile, leaf] if leaf.requires_grad else [tile]
    d_tile, *d_weight = torch.autograd.grad(token_loss, learning, loss_weights.to(token_loss.dtype))
    sums.add(d_weight or [None])
    losses.append(token_loss.detach())
    return d_tile
