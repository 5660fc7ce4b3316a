"""Gated recurrences as mixers of a decoder's layer: Gated DeltaNet and Mamba-2.

A mixer projects its input to queries, keys, values, gates of the recurrence and a gate of the output;
convolves queries, keys and values along the sequence; runs the recurrence; normalises and gates the output.
From the convolutions to the recurrence no heads mix, so a strategy may give a rank some heads of the whole
sequence, or send between neighbours what their positions add to the state.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, Z heads
(this rank's), G heads of queries and keys (this rank's), D their size, A size of values, W positions that a
convolution sees.

Gated DeltaNet (Yang et al., arXiv 2412.06464), as fla's GatedDeltaNet and the layers of Qwen3-Next: queries,
keys and values are convolved without biases, and queries and keys get length one. A head keeps the share
exp(-exp(A_log) softplus(a + dt_bias)) of its state and writes with the strength sigmoid(b), with a and b
projected from the input. The output is normalised, with a weight that all heads share, and multiplied by
silu(z). Each part has a projection of its own, as in fla.

Mamba-2 (Dao and Gu, arXiv 2405.21060), as mamba_ssm's Mamba2 with its norm: C, B and x (queries, keys and
values) are convolved with biases. The step of a head is softplus(dt + dt_bias), its decay
exp(-exp(A_log) step); D x is added to the state's output, which silu(z) multiplies before a norm over each
group's features. Each part has a projection of its own, whereas mamba_ssm has one matmul. As in its
memory-saving path (mamba_split_conv1d_scan_combined), only projections are kept, and backward convolves
again. Megatron-Core (ssm/mamba_mixer.py) leaves the gate to that kernel: the kernel keeps its result before
the gate, and the norm keeps the gated result too.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.attended import Attended
from spbench.impls.kernels.activations import silu_times
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.gated_norm import gated_norm, l2_norm
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE
from spbench.impls.kernels.recurrence import Rule, sequential
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.kernels.short_convolution import plain_short_convolution, short_convolution
from spbench.impls.kernels.state_space import StateSpace
from spbench.impls.models.blocks.architecture import Mixer
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.places import Places
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.recurrence import RecurrenceHooks

#: queries, keys and values; the gates of a recurrence; the gate of its output
Projected = tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]

#: "chunked": fused kernels of the recurrence and around it; "sequential": torch's operators for one position
#: after another
WAYS = ("chunked", "sequential")


@dataclass(frozen=True)
class RecurrentLayer(Mixer):
    """A kind of mixer that is a gated recurrence.

    Attributes:
        heads: Z, heads of values.
        key_heads: G, heads of queries and keys, each for Z/G heads of values.
        key_size: D, features of a query or a key; the state is D x A.
        value_size: A, features of a value.
        convolution: W, positions that a short convolution sees.
        way: one of :data:`WAYS`.

    Raises:
        ValueError: G does not divide Z, or ``way`` is not one of :data:`WAYS`.
    """

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    convolution: int = 4
    way: str = "chunked"

    #: the rule that carries the state from position to position
    rule: ClassVar[type[Rule]]
    #: how many numbers gate the recurrence for each head and position
    gates: ClassVar[int]
    #: whether convolutions have biases
    biased: ClassVar[bool]
    #: whether backward convolves again and computes the gates again, so that only projections are kept
    makes_again: ClassVar[bool] = False
    #: whether backward computes only the gates again
    gates_again: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choices(self, {"way": WAYS})
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads {self.key_heads} does not divide heads {self.heads} of a recurrence")

    def width(self, model: DecoderOptions) -> int:
        return self.heads * self.value_size

    def gathers_once(self, model: DecoderOptions) -> bool:
        return True

    @property
    def channels(self) -> tuple[int, int, int]:
        """The features of queries, of keys and of values of all heads, the channels of the convolutions."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.heads * self.value_size

    @property
    def projected(self) -> list[int]:
        """The features of each projection: queries, keys, values, output gate, gates of the recurrence."""
        return [*self.channels, self.heads * self.value_size, *[self.heads] * self.gates]

    @property
    def decay_biases(self) -> int:
        """The number of biases of the gates that say how much of the state is kept."""
        return self.heads

    def split_parameters(self, model: DecoderOptions) -> int:
        """The number of parameters that a strategy can split by head."""
        columns = self.convolution + (1 if self.biased else 0)
        projections = sum(self.projected) + self.heads * self.value_size
        return projections * model.hidden + columns * sum(self.channels) + self.heads + self.decay_biases

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        d, a = self.key_size, self.value_size
        dims = {"B": batch, "L": seq_len, "Z": self.heads, "A": a, "G": self.key_heads, "D": d}
        dims |= {"M": self.rule.carry_elements(d, a) - d * a, "W": self.convolution, "gates": self.gates}
        return [Site("gated_recurrence", 1, dims | model.heeded(seq_len), again)]


class RecurrentMixer(nn.Module, ABC):
    """The module of a gated recurrence, x [B, L, H] -> [B, L, H]."""

    def __init__(self, kind: RecurrentLayer, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.kind, self.model, self.strategy, self.rule = kind, model, strategy, kind.rule
        #: the way of the norms' kernels
        self.way = "plain" if kind.way == "sequential" else "fused"
        self.project = strategy.separate_linear_in(model.hidden, kind.projected)
        by_feature = strategy.feature_parameter
        width = kind.convolution
        self.convolutions = nn.ParameterList(by_feature(torch.zeros(n, width)) for n in kind.channels)
        self.biases = nn.ParameterList(by_feature(torch.zeros(n)) for n in kind.channels if kind.biased)
        # the released code draws decays and steps between these bounds; here they are spread evenly
        self.A_log = by_feature(torch.linspace(1.0, 16.0, kind.heads).log())
        steps = torch.linspace(math.log(1e-3), math.log(0.1), kind.decay_biases).exp()
        self.dt_bias = by_feature(steps + torch.log(-torch.expm1(-steps)))  # softplus(dt_bias) is the step
        self.out = strategy.linear_out(kind.heads * kind.value_size, model.hidden)

    def of_heads(self) -> Sequence[Tensor]:
        """The weights with numbers for each head [Z, ...]: A_log, dt_bias, and maybe more."""
        return self.A_log, self.dt_bias

    def projections(self, x: Tensor) -> Projected:
        """The projections of x [B, L, H]: queries, keys and values; the n gates of the recurrence
        [B, L, Z, n]; the gate of the output [B, L, Z A]."""
        q, k, v, gate, *gates = self.project(x)
        return (q, k, v), torch.stack(gates, -1), gate

    @abstractmethod
    def of_recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *by_head: Tensor
    ) -> Sequence[Tensor]:
        """The inputs of :func:`gated_recurrence`, from convolved q, k [B, L, G, D] and v [B, L, Z, A], and
        the gates' n projections [B, L, Z, n] in the states' dtype. ``by_head``: the weights of
        :meth:`of_heads`."""

    @abstractmethod
    def normalised(self, o: Tensor, gate: Tensor) -> Tensor:
        """The normalised and gated output [B, L, Z A], from the recurrence's o and the gate [B, L, Z, A]."""

    def forward(self, x: Tensor, places: Places) -> Tensor:
        qkv, gates, gate = self.projections(x)
        by_heads = [*self._of_heads(*qkv, dim=-1), gates]
        del qkv, gates
        weights = (
            *self._of_heads(*self.convolutions, dim=0),
            *self._of_heads(*self.biases, dim=0),
            *self.of_heads(),
        )
        o = self.strategy.mix_by_heads(partial(self._mixed, places.attended), by_heads, weights)
        return self.out.project(self.normalised(o, gate.unflatten(-1, o.shape[-2:])))

    def _of_heads(self, *of_qkv: Tensor, dim: int) -> Iterator[Tensor]:
        """The tensors of queries, keys and values, with ``dim`` split into heads and features of a head."""
        sizes = self.kind.key_size, self.kind.key_size, self.kind.value_size
        for x, size in zip(of_qkv, sizes, strict=False):
            yield x.unflatten(dim, (-1, size))

    def _mixed(
        self, attended: Attended, hooks: RecurrenceHooks, by_heads: list[Tensor], weights: Sequence[Tensor]
    ) -> Tensor:
        *inputs, gates = by_heads
        by_heads.clear()  # so that the caller holds no tensor, and each is freed after its convolution
        starts = hooks.document_starts(attended, gates.shape[1])
        biases, by_head = (weights[3:6], weights[6:]) if self.kind.biased else ([None] * 3, weights[3:])
        # the last positions of all channels, in one message
        rows = torch.cat([x[:, 1 - self.kind.convolution :].flatten(2) for x in inputs], -1)
        before = hooks.rows_before(rows)
        del rows
        widths = [x[0, 0].numel() for x in inputs]
        parts = [None] * 3 if before is None else before.split(widths, -1)
        run = sequential if self.kind.way == "sequential" else hooks.gated_recurrence
        run = partial(run, self.rule, starts=starts)
        beside = *weights[:3], *biases, *parts
        if self.kind.makes_again:
            return run(*inputs, *beside, gates, *by_head, make=partial(self._made, starts))
        for i in range(3):
            inputs[i] = self._convolved(starts, inputs[i], *beside[i::3])
        if self.kind.gates_again:
            return run(*inputs, gates, *by_head, make=self.with_gates)
        made = self.with_gates(*inputs, gates, *by_head)
        del inputs, gates
        return run(*made)

    def _made(self, starts: Sequence[int], *sources: Tensor) -> Sequence[Tensor]:
        """The inputs of the recurrence, from ``sources``: queries, keys and values before convolution; the
        convolutions' weights, biases and rows of earlier ranks; the gates' projections; weights by head."""
        inputs = (self._convolved(starts, *sources[i:12:3]) for i in range(3))
        return self.with_gates(*inputs, *sources[12:])

    def _convolved(
        self, starts: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None
    ) -> Tensor:
        """The convolution of x [B, L, heads, size], queries, keys or values; ``before``: rows before x."""
        convolve = plain_short_convolution if self.kind.way == "sequential" else short_convolution
        bias = None if bias is None else bias.flatten()
        return convolve(x.flatten(2), weight.flatten(0, 1), bias, before, starts).view(x.shape)

    def with_gates(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *by_head: Tensor
    ) -> Sequence[Tensor]:
        """:meth:`of_recurrence`, with gates in any dtype."""
        return self.of_recurrence(q, k, v, gates.to(state_dtype(gates.dtype)), *by_head)


def change_rules(module: nn.Module, change: Callable[[type[Rule]], type[Rule]]) -> None:
    """Change the rules of all recurrences in a module; recurrences that shared a rule share the new rule."""
    mixers = [each for each in module.modules() if isinstance(each, RecurrentMixer)]
    rules = {each.rule: change(each.rule) for each in mixers}
    for each in mixers:
        each.rule = rules[each.rule]


@dataclass(frozen=True)
class GatedDeltaNet(RecurrentLayer):
    """The kind of mixer that is Gated DeltaNet."""

    rule: ClassVar[type[Rule]] = GatedDelta
    gates: ClassVar[int] = 2
    biased: ClassVar[bool] = False
    #: whether the gate of the output is a sigmoid, not SiLU
    gate_sigmoid: ClassVar[bool] = False

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return GatedDeltaNetMixer(self, model, strategy)

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        return {"split": self.split_parameters(model), "whole": self.value_size}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        norm = Site("shared_by_heads", 1, {"A": self.value_size}, again)
        return [*super().sites(model, batch, seq_len, again), norm]


class GatedDeltaNetMixer(RecurrentMixer):
    """The module of Gated DeltaNet, x [B, L, H] -> [B, L, H], whose output is normalised, then gated."""

    kind: GatedDeltaNet

    def __init__(self, kind: GatedDeltaNet, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        self.norm = nn.Parameter(torch.ones(kind.value_size))

    def of_recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *by_head: Tensor
    ) -> Sequence[Tensor]:
        a_log, dt_bias = (w.to(gates.dtype) for w in by_head)
        q, k = (l2_norm(x, way=self.way) for x in (q, k))
        a, b = gates.unbind(-1)
        return q, k, v, -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()

    def normalised(self, o: Tensor, gate: Tensor) -> Tensor:
        weight, epsilon = self.strategy.shared_by_heads(self.norm), self.model.norm_epsilon
        how = {"gate_first": False, "sigmoid": self.kind.gate_sigmoid}
        return gated_norm(o, gate, weight, epsilon, **how, way=self.way).flatten(2)


@dataclass(frozen=True)
class Mamba2(RecurrentLayer):
    """The kind of mixer that is Mamba-2: Z heads of A features (headdim), G groups (n_groups), and D numbers
    of the state for each feature (d_state)."""

    rule = StateSpace
    gates: ClassVar[int] = 1
    biased: ClassVar[bool] = True
    makes_again: ClassVar[bool] = True

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return Mamba2Mixer(self, model, strategy)

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        return {"split": self.split_parameters(model) + self.heads + self.heads * self.value_size}


class Mamba2Mixer(RecurrentMixer):
    """The module of Mamba-2, x [B, L, H] -> [B, L, H], whose output is gated, then normalised."""

    def __init__(self, kind: Mamba2, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        self.D = strategy.feature_parameter(torch.ones(kind.heads))
        self.norm = strategy.feature_parameter(torch.ones(kind.heads * kind.value_size))

    def of_heads(self) -> Sequence[Tensor]:
        return *super().of_heads(), self.D

    def of_recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *by_head: Tensor
    ) -> Sequence[Tensor]:
        a_log, dt_bias, d = (w.to(gates.dtype) for w in by_head)
        step = F.softplus(gates.squeeze(-1) + dt_bias)
        return q, k, v, -a_log.exp() * step, step, d.to(v.dtype)

    def normalised(self, o: Tensor, gate: Tensor) -> Tensor:
        group = self.kind.heads // self.kind.key_heads
        o, gate = (x.flatten(2).unflatten(-1, (-1, group * self.kind.value_size)) for x in (o, gate))
        weight, epsilon = self.norm.view(o.shape[-2:]), self.model.norm_epsilon
        if self.model.library == TRANSFORMER_ENGINE and self.way == "fused":
            return rms_norm(silu_times(gate, o), weight, epsilon).flatten(2)
        return gated_norm(o, gate, weight, epsilon, gate_first=True, way=self.way).flatten(2)
