"""The attention of UPipe's rounds: one graph for all of them."""

import gc
import weakref

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spbench.impls.strategies.repeated_attention import RepeatedAttention


def test_it_is_given_up_with_its_graph() -> None:
    """A cycle through a graph, which nothing collects, would keep the process groups of a strategy."""

    class Attend:
        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    attend, x = Attend(), torch.randn(1, 2, 4, 3)
    attention, held = RepeatedAttention(attend), weakref.ref(attend)
    attention.forward(x, x, x)
    del attend, attention
    gc.collect()
    assert held() is None
