"""Weights that are kept in eight bits.

Megatron-LM's ``--fp8-param-gather`` keeps weights whose matmuls are in eight bits as E4M3 alone, one byte an
element with one scale a weight, in a buffer of their own beside that of other weights. After an update each
rank casts its part of the main weights. The largest magnitude of a weight lies on any of the ranks that share
it, so one all-reduce of those of all weights comes before (cast_master_weights_to_fp8 of
transformer_engine/pytorch/tensor/utils.py, 2.x); with delayed scaling it comes after, for the next scales.
The cast parts are gathered in place of sixteen bits.
"""

from __future__ import annotations

from torch import Tensor, nn

from spbench.impls.kernels.fp8_casts import E4M3, WHOLE, fp8_amax, fp8_cast


def in_eight_bits(p: Tensor) -> bool:
    """Whether a weight can be kept in eight bits: its recipe has one scale for all of it."""
    recipe = getattr(p, "spbench_fp8", None)
    return recipe is not None and bool(recipe.whole)


def keep_in_eight_bits(p: nn.Parameter, into: Tensor) -> None:
    """Cast a weight into bytes of its shape, which are its values from now on. Its gradients stay in its
    precision, and its values before the cast are kept for :func:`main_weight`."""
    before, data = p.detach(), into.view(E4M3)
    p.spbench_before_cast = before  # type: ignore[attr-defined]
    whole = before.flatten(0, -2)
    cast, scale = fp8_cast(whole, fp8_amax(whole), E4M3, WHOLE, None, False)
    data.copy_(cast.view_as(data))
    p.spbench_fp8_scale = scale  # type: ignore[attr-defined]
    p.data, p.grad_dtype = data, before.dtype
