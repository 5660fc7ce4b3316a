"""The FLOPs and bytes of the attention kernels, and the least time for these that a card's datasheet allows.

    python scripts/kernel_roofline.py

Prints the tables of results/benchmarks/kernels.md: nothing is measured, and no GPU is needed. The operators'
own formulas give the FLOPs; the least bytes are the bytes of an operator's arguments and results; the rates
come from the clusters' files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.papers.paper_findings import Line, markdown
from spbench.impls.kernels import flash_attention  # noqa: F401  (defines its operators)
from spbench.impls.kernels.linear_attention import BLOCK, OPS, TILE
from spbench.impls.models.causal_transformer import PRESETS as SOFTMAX_MODELS
from spbench.impls.models.tnl import PRESETS as LINEAR_MODELS

CARDS = {"A100": "dgx-a100", "H100": "dgx-h100"}
#: the rate of dense TF32 over the rate of dense bfloat16, on both cards' datasheets
TF32 = 0.5
DTYPE = torch.bfloat16
#: tokens of a rank: LASP's longest sequence with TNL-1B is 4096K on 128 cards (arXiv 2404.02882, abstract)
LENGTH = 32768
BLOCKS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Kernel:
    """One call of an operator.

    Attributes:
        name: the name of the operator.
        flops: the floating-point operations of the call.
        least_bytes: the bytes of the arguments and results.
        loaded_bytes: the bytes that the kernel's programs load and store, if no program finds another's in a
            cache; None if the kernel is not ours.
        rate: the share of the card's bfloat16 rate at which the kernel's matmuls can run.
    """

    name: str
    flops: int
    least_bytes: int
    loaded_bytes: int | None = None
    rate: float = 1.0

    def roofline_s(self, flop_rate: float, byte_rate: float, nbytes: int | None = None) -> float:
        """The least seconds of the call, which moves ``nbytes`` or, if that is None, ``least_bytes``."""
        return max(self.flops / (flop_rate * self.rate), (nbytes or self.least_bytes) / byte_rate)


def called(operator: Any, arguments: Sequence[Any], results: Any, **about: Any) -> Kernel:
    """The kernel of an operator's call with these arguments and results, which are fake tensors."""
    nbytes = sum(x.nbytes for x in tree_leaves((arguments, results)) if isinstance(x, Tensor))
    flops = flop_registry[operator](*arguments, out_val=results)
    return Kernel(operator.__name__.replace("_", " "), flops, nbytes, **about)


def _at_boundaries(pairs: int, length: int, k: int, n: int, states: Tensor) -> int:
    """The bytes that all programs of the kernels ``_boundaries`` and ``_scan`` load and store."""
    tiles = -(-k // TILE) * -(-n // TILE)
    rows = pairs * length * tiles * (min(k, TILE) + min(n, TILE)) * DTYPE.itemsize
    return rows + 3 * states.nbytes  # written, then read and written by the scan


def _at_positions(pairs: int, length: int, k: int, n: int, block: int) -> int:
    """The bytes that all programs of the kernel ``_positions`` load and store."""
    columns = min(n, 2 * TILE)
    programs = pairs * -(-length // TILE) * -(-n // columns)
    others = (min(block, length) // TILE + 1) / 2  # tiles of the block on one side of the diagonal
    state, row, column = k * columns * 4, TILE * k * DTYPE.itemsize, TILE * columns * DTYPE.itemsize
    return round(programs * (state + row + others * (2 * row + column) + column))


def linear_kernels(heads: int, size: int, length: int, block: int = BLOCK) -> Iterator[Kernel]:
    """The four operators of a step of linear attention, for one rank's ``length`` tokens of one sequence."""
    with FakeTensorMode():
        q, k, v, d_o = (torch.empty(1, heads, length, size, dtype=DTYPE) for _ in range(4))
        decay = torch.empty(heads)
        initial, d_final = (torch.empty(1, heads, size, size) for _ in range(2))
        shape = (heads, length, size, size, block)
        states = OPS.linear_attention_states(k, v, decay, block)
        at_boundaries = {"loaded_bytes": _at_boundaries(heads, length, size, size, states), "rate": TF32}
        yield called(OPS.linear_attention_states, (k, v, decay, block), states, **at_boundaries)
        given: tuple[Any, ...] = (q, k, v, decay, states, initial, block)
        o = OPS.linear_attention_output(*given)
        yield called(OPS.linear_attention_output, given, o, loaded_bytes=_at_positions(*shape))
        given = (q, d_o, decay, block)
        d_states = OPS.linear_attention_state_gradients(*given)
        yield called(OPS.linear_attention_state_gradients, given, d_states, **at_boundaries)
        given = (q, k, v, d_o, decay, states, initial, d_states, d_final, block)
        gradients = OPS.linear_attention_input_gradients(*given)
        loaded = 3 * _at_positions(*shape)
        yield called(OPS.linear_attention_input_gradients, given, gradients, loaded_bytes=loaded)


def flash_kernels(heads: int, size: int, length: int, causal: bool) -> Iterator[Kernel]:
    """The two operators of a block of Ring Attention, for one rank's ``length`` tokens of one sequence."""
    with FakeTensorMode():
        q, k, v, d_o = (torch.empty(1, heads, length, size, dtype=DTYPE) for _ in range(4))
        o, lse = OPS.flash_attention(q, k, v, 1.0, causal)
        yield called(OPS.flash_attention, (q, k, v, 1.0, causal), (o, lse))
        given = (d_o, q, k, v, o, lse, 1.0, causal)
        yield called(OPS.flash_attention_backward, given, OPS.flash_attention_backward(*given))


def rates() -> dict[str, tuple[float, float]]:
    """The peak bfloat16 FLOPs per second and the bytes per second of memory, by card."""
    by_card = {}
    for card, name in CARDS.items():
        device = load_cluster(name).device
        flops, bandwidth = device.peak_flops_per_s["bf16"].value, device.memory_bandwidth_bytes_per_s.value
        assert flops is not None
        assert bandwidth is not None
        by_card[card] = flops, bandwidth
    return by_card


def models() -> Iterator[list[Kernel]]:
    """The kernels of two models, one of linear and one of softmax attention, with 16 heads of 128 each."""
    linear = LINEAR_MODELS["tnl-1b"]
    yield [*linear_kernels(linear.heads, linear.hidden // linear.heads, LENGTH)]
    softmax = SOFTMAX_MODELS["causal-transformer-1b"]
    size = softmax.hidden // softmax.heads
    yield [*flash_kernels(softmax.heads, size, LENGTH, causal=True)]


def kernel_table() -> list[Line]:
    """The table of all kernels: a line for each, with FLOPs, bytes and the least time on each card."""
    cards = rates()
    heads = [f"{card} {what}" for card in cards for what in ("ms", "of peak", "without L2")]
    columns, table = ["kernel", "GFLOP", "MB", *heads], []
    for kernels in models():
        for kernel in kernels:
            loaded = kernel.loaded_bytes
            line = [kernel.name, f"{kernel.flops / 1e9:.1f}", f"{kernel.least_bytes / 1e6:.0f}"]
            for flop_rate, byte_rate in cards.values():
                best = kernel.roofline_s(flop_rate, byte_rate)
                line += [f"{best * 1e3:.3f}", f"{kernel.flops / best / flop_rate:.0%}"]
                line += [f"{best / kernel.roofline_s(flop_rate, byte_rate, loaded):.0%}" if loaded else ""]
            table.append(dict(zip(columns, line, strict=True)))
    return table


def block_table() -> list[Line]:
    """The table of block sizes: a line for each, with sums over the kernels of a step of TNL-1B's
    attention."""
    cards = rates()
    model = LINEAR_MODELS["tnl-1b"]
    columns, table = ["block", "GFLOP", "MB", "MB kept in states", *(f"{card} ms" for card in cards)], []
    for block in BLOCKS:
        kernels = [*linear_kernels(model.heads, model.hidden // model.heads, LENGTH, block)]
        states = model.heads * (LENGTH // block + 1) * (model.hidden // model.heads) ** 2 * 4
        line = [str(block), f"{sum(k.flops for k in kernels) / 1e9:.1f}"]
        line += [f"{sum(k.least_bytes for k in kernels) / 1e6:.0f}", f"{states / 1e6:.0f}"]
        line += [f"{sum(k.roofline_s(*rate) for k in kernels) * 1e3:.3f}" for rate in cards.values()]
        table.append(dict(zip(columns, line, strict=True)))
    return table


if __name__ == "__main__":
    print(markdown(kernel_table()), markdown(block_table()), sep="\n")
