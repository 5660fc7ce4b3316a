"""The interface of a model: its options, its modules, its inputs, and its sites (what the modules ask of a
strategy)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.options import Saving
from spbench.impls.strategies.base import SequenceDim, Site, Strategy, Unsupported


def check_positions(rows: int | None, longest: int) -> None:
    """Raise :class:`Unsupported` if ``longest`` positions exceed the rows of a table of learned positions."""
    if rows is not None and longest > rows:
        raise Unsupported(
            f"the model has {rows} learned positions, not the {longest} of the sequence", "set max_positions"
        )


class Model(ABC):
    """A model before it is built. Subclasses are frozen dataclasses whose fields are the options that a
    scenario may set."""

    #: the dim of each input that counts positions of the sequence; None: the input has no such dim
    sequence_dims: ClassVar[Mapping[str, SequenceDim]]
    #: the inputs whose first dim is not the batch
    unbatched: ClassVar[frozenset[str]] = frozenset()
    #: the inputs that only the loss needs, which inference does without
    targets: ClassVar[frozenset[str]] = frozenset()
    #: the names of the parts that sum to the loss: a module that returns ``loss`` returns ``NAME_loss`` too
    losses: ClassVar[tuple[str, ...]] = ()
    #: whether the model has weights, and so can be trained; without weights all inputs are activations, of
    #: the precision's type
    has_weights: ClassVar[bool] = True
    #: every option that changes how, not what, the model computes, with the value that uses only torch's own
    #: operators. Verification's reference has these values. An option that is missing here would not be
    #: verified, because the reference would run the same code; tests/impls/models/test_models.py checks that
    #: none is missing
    plain_options: ClassVar[Mapping[str, Any]] = {}
    #: the plain options that round more than the dtype does, such as casts to eight bits: verification then
    #: allows the errors that a single device makes with these options
    rounding_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def attention_kernel(self) -> str:
        """The name of the fused kernel of softmax attention, whose rates time attention; "flash": the default
        kernel of programs on the card."""
        return "flash"

    @property
    def of_one_head_size(self) -> Mapping[str, Any]:
        """The changes of options for attention kernels that support only one head size of keys and values."""
        return {}

    @property
    def period(self) -> int:
        """The number of layers after which the kinds of layers repeat, so that a trace of few layers tells
        the trace of more layers."""
        return 1

    @property
    def unlike_layers(self) -> int:
        """The number of layers at the beginning that differ from the repeating layers."""
        return 0

    @property
    def rounding(self) -> dict[str, Any]:
        """The values of the :attr:`rounding_options` that differ from the plain values."""
        values = {name: getattr(self, name) for name in self.rounding_options}
        return {name: value for name, value in values.items() if value != self.plain_options[name]}

    def variants(self) -> list[Mapping[str, Any]]:
        """The changes of options that verification tries too, because each leads to other sites."""
        return []

    def savings(self, stages: int = 1) -> Iterator[Saving]:
        """The changes of options that take less memory, the cheapest first.

        Args:
            stages: the number of pipeline stages.
        """
        yield from ()

    def mending(self, seq_len: int) -> Mapping[str, Any]:
        """The changes of options with which more strategies run, for sequences of ``seq_len`` positions: no
        dropout, attention without a tensor of all scores, and a table of at least ``seq_len`` positions."""
        plain: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
        if getattr(self, "attention", "") == "unfused":
            plain["attention"] = "flash"
        if (getattr(self, "max_positions", None) or seq_len) < seq_len:
            plain["max_positions"] = seq_len
        return {name: value for name, value in plain.items() if getattr(self, name, value) != value}

    def shrunk(self) -> Model:
        """The model in small sizes and without dropout, for verification; by default the model itself."""
        return self

    def tokens(self, batch: int, seq_len: int) -> int:
        """The number of tokens of a batch of sequences of ``seq_len`` positions, for throughput: one token a
        position, unless a model makes one token of several positions."""
        return batch * seq_len

    def attended(self, seq_len: int) -> Attended:
        """The positions that each position of a sequence attends to in causal attention."""
        return CAUSAL

    def padding(self, seq_len: int) -> float | None:
        """The share of a sequence's positions that pad packed documents; None: there are no documents."""
        return None

    @abstractmethod
    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        """The module, whose ``forward(inputs)`` returns a dict with at least ``loss``, a scalar, this rank's
        share of the loss. For the module of a pipeline stage see :class:`Pipeline`.

        Raises:
            Unsupported: the sizes, or the stages, cannot be built.
        """

    @abstractmethod
    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """A whole batch of random inputs, by name, from ``generator``."""

    def batches(self, batch: int, seq_len: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """An endless iterator of whole batches of real data, as :meth:`inputs`, the same for every strategy.

        Raises:
            Unsupported: there is no real data for this model.
        """
        raise Unsupported(f"{type(self).__name__} has no real data to learn from", "measure it instead")

    @abstractmethod
    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        """The sites of a pipeline stage for one batch, for closed forms and checks. Sites of the kinds
        ``tied_embedding`` and ``parameters`` count once a step."""

    @abstractmethod
    def parts(self) -> Mapping[str, ModelPart]:
        """The parts of the model that verification compares one by one, by name, the smallest first."""


class AttentionHeads:
    """Options of a model whose hidden size is divided among heads of equal size."""

    hidden: int
    heads: int

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}")

    @property
    def head_size(self) -> int:
        """The features of a head, A."""
        return self.hidden // self.heads


class PaddedVocabulary:
    """Options of a model with a word embedding, whose rows are padded; see :class:`BertModel`."""

    hidden: int
    vocabulary: int
    vocabulary_multiple: int

    def padded_vocabulary(self, parts: int) -> int:
        """The rows of the padded word embedding where a strategy splits the embedding into ``parts``."""
        multiple = self.vocabulary_multiple * parts
        return math.ceil(self.vocabulary / multiple) * multiple

    def vocabulary_sites(
        self, batch: int, seq_len: int, rows: int, stage: Stage, *, tied: bool
    ) -> Iterator[Site]:
        """The sites of embedding, head and loss of a pipeline stage for one batch.

        Args:
            rows: the rows of the padded word embedding.
            tied: whether the head shares the weights of the word embedding.
        """
        hidden = {"B": batch, "L": seq_len, "H": self.hidden}
        if stage.first:
            yield Site("embedding", 1, hidden | {"V": rows})
        if stage.last:
            yield Site("vocabulary_logits", 1, hidden | {"V": rows})
            yield Site("cross_entropy", 1, {"B": batch, "L": seq_len, "V": rows})
        if stage.count > 1:
            yield Site("stage_boundary", 1, hidden)
            if tied:
                words = rows * self.hidden
                yield Site("tied_embedding", 1, {"elements": words, "split": words, "vocabulary": words})


@dataclass(frozen=True)
class ModelPart:
    """A part of a model that verification can compare by itself.

    Attributes:
        build: makes the part's module, whose ``forward(inputs)`` returns a dict of outputs, for a strategy
            and a sequence length.
        inputs: makes whole inputs for (batch, seq_len, generator); floating-point inputs get gradients.
        sequence_dims: see :attr:`Model.sequence_dims`.
        output_dims: the sequence dim of each output; None: the output is a loss, this rank's share. The
            compared gradients start from the output "loss", if there is one."""

    build: Callable[[Strategy, int], nn.Module]
    inputs: Callable[[int, int, torch.Generator], dict[str, Tensor]]
    sequence_dims: Mapping[str, SequenceDim]
    output_dims: Mapping[str, SequenceDim]
