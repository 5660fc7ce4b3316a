"""What a model is to the harness."""

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
    """Raise :class:`Unsupported` if a sequence has more positions than a table of learned ones has rows."""
    if rows is not None and longest > rows:
        raise Unsupported(
            f"the model has {rows} learned positions, not the {longest} of the sequence", "set max_positions"
        )


class Model(ABC):
    """A model before it is built: its options, and what the harness asks of it.

    Subclasses are frozen dataclasses whose fields are the options that a scenario may set.
    """

    #: the sequence dim of each input
    sequence_dims: ClassVar[Mapping[str, SequenceDim]]
    #: the inputs whose first dim is not the batch
    unbatched: ClassVar[frozenset[str]] = frozenset()
    #: the inputs that only the loss needs, which inference does without
    targets: ClassVar[frozenset[str]] = frozenset()
    #: the parts that the loss is the sum of: where there is ``loss``, a module returns ``NAME_loss`` too
    losses: ClassVar[tuple[str, ...]] = ()
    #: whether it has weights, and so can be trained; without them all inputs are activations, of the
    #: precision's type
    has_weights: ClassVar[bool] = True
    #: options with which the model is made of torch's own operators only, as verification's oracle is: every
    #: option that changes how, not what, the model computes. One that is missing here makes verification
    #: blind to it, as the oracle would run the same code; tests/impls/models/test_models.py asks for
    #: each
    plain_options: ClassVar[Mapping[str, Any]] = {}
    #: those of the plain options that round more than the dtype does, as casts to eight bits: results are
    #: judged by the errors that one device makes with them
    rounding_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def attention_kernel(self) -> str:
        """The kernel of softmax attention without scores, by whose rates it is timed; "flash": that which a
        card's programs run where nothing else is said."""
        return "flash"

    @property
    def of_one_head_size(self) -> Mapping[str, Any]:
        """The options of this model on a kernel of attention that has one head size for keys and values."""
        return {}

    @property
    def period(self) -> int:
        """Layers after which the kinds of layers repeat, so that a model of fewer layers stands for one of
        more."""
        return 1

    @property
    def unlike_layers(self) -> int:
        """Layers at the beginning that are unlike those that repeat."""
        return 0

    @property
    def rounding(self) -> dict[str, Any]:
        """The :attr:`rounding_options` that differ from the plain ones."""
        values = {name: getattr(self, name) for name in self.rounding_options}
        return {name: value for name, value in values.items() if value != self.plain_options[name]}

    def variants(self) -> list[Mapping[str, Any]]:
        """Changes of options that ask something else of a strategy, for verification to try too."""
        return []

    def savings(self, stages: int = 1) -> Iterator[Saving]:
        """The changes that take less memory than these options do, the cheapest first.

        Args:
            stages: of the pipeline.
        """
        yield from ()

    def mending(self, seq_len: int) -> Mapping[str, Any]:
        """The values of options with which more strategies run, and sequences as long as that: without
        dropout and all scores, and with a table of as many positions."""
        plain: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
        if getattr(self, "attention", "") == "unfused":
            plain["attention"] = "flash"
        if (getattr(self, "max_positions", None) or seq_len) < seq_len:
            plain["max_positions"] = seq_len
        return {name: value for name, value in plain.items() if getattr(self, name, value) != value}

    def shrunk(self) -> Model:
        """The same layers in small sizes and without dropout, for verification; here the model itself."""
        return self

    def tokens(self, batch: int, seq_len: int) -> int:
        """The tokens that the model computes with for a batch of sequences of ``seq_len`` positions, by which
        its throughput is counted: as many as positions, unless a model makes a token of several."""
        return batch * seq_len

    def attended(self, seq_len: int) -> Attended:
        """What positions of its sequences attend to, where attention is causal."""
        return CAUSAL

    @abstractmethod
    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        """The module. ``forward(inputs)`` returns a dict with at least ``loss``, this rank's share, a scalar.
        For a pipeline stage, see :class:`Pipeline`.

        Raises:
            Unsupported: the sizes, or the stages, cannot be built.
        """

    @abstractmethod
    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """A whole batch of made-up data (integers and weights), from ``generator``."""

    def batches(self, batch: int, seq_len: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Endless whole batches of real data, with the names of :meth:`inputs`; the same for every strategy.

        Raises:
            Unsupported: there is no real data for this model.
        """
        raise Unsupported(f"{type(self).__name__} has no real data to learn from", "measure it instead")

    @abstractmethod
    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        """What a stage asks of its strategy for one batch, for closed forms and checks; the sites of kinds
        ``tied_embedding`` and ``parameters`` once a step."""

    @abstractmethod
    def parts(self) -> Mapping[str, ModelPart]:
        """The pieces that verification compares one by one, smallest first."""


class AttentionHeads:
    """Options of a model whose heads divide its hidden size between them."""

    hidden: int
    heads: int

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}")

    @property
    def head_size(self) -> int:
        """Features of a head, A."""
        return self.hidden // self.heads


class PaddedVocabulary:
    """Options of a model with a word embedding and a head; see :class:`BertModel`."""

    hidden: int
    vocabulary: int
    vocabulary_multiple: int

    def padded_vocabulary(self, parts: int) -> int:
        """Rows of the word embedding when it is split into ``parts``."""
        multiple = self.vocabulary_multiple * parts
        return math.ceil(self.vocabulary / multiple) * multiple

    def vocabulary_sites(
        self, batch: int, seq_len: int, rows: int, stage: Stage, *, tied: bool
    ) -> Iterator[Site]:
        """What embedding, head and loss of the model or of a pipeline stage ask of a strategy for one batch.

        Args:
            rows: of the padded word embedding.
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
    """A piece of a model that can be verified alone.

    Attributes:
        build: makes the piece, ``forward(inputs) -> dict`` of named outputs, for a sequence length.
        inputs: makes its whole inputs for (batch, seq_len, generator); floating ones get gradients.
        sequence_dims: as :attr:`Model.sequence_dims`.
        output_dims: the sequence dim of each output; one without (None) is a loss, this rank's share. The
            gradients that are compared start from the output "loss", where there is one.
    """

    build: Callable[[Strategy, int], nn.Module]
    inputs: Callable[[int, int, torch.Generator], dict[str, Tensor]]
    sequence_dims: Mapping[str, SequenceDim]
    output_dims: Mapping[str, SequenceDim]
