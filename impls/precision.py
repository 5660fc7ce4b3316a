"""The precisions that a model can be trained in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """How numbers are held.

    Attributes:
        parameters: dtype of weights, activations and gradients.
        master: keep float32 copies of the weights for the optimizer.
        loss_scale: initial dynamic loss scale, or None.
    """

    parameters: torch.dtype
    master: bool = False
    loss_scale: float | None = None


PRECISIONS = {
    "fp16": Precision(torch.float16, master=True, loss_scale=2.0**16),
    "bf16": Precision(torch.bfloat16, master=True),
    "fp32": Precision(torch.float32),
    "fp64": Precision(torch.float64),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new floating tensors of that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
