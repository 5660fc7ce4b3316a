"""The interface between a training step and its data-parallel backend.

If the ranks along axes of the strategy each hold a part of a gradient, the gradient is summed over these
ranks and all replicas at once; any other gradient is summed over the replicas. So a backend sees sets of
parameters, each with the group over which its gradients are summed: at most two sets for a strategy of one
axis, up to four for strategies around each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.backends.optimizer_options import EACH_WEIGHT, HostLayout, OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.composition import Composition, by_partial_axes, summed_axes, trained_parameters
from spbench.impls.folding import FOLDED_AXES, folds
from spbench.impls.kernels.packed_weights import scales_in
from spbench.impls.layout import Unsupported, is_expert
from spbench.impls.options import Options
from spbench.impls.place import Place
from spbench.impls.strategies.base import Strategy, shard_of
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class HeldPart:
    """The part of a parameter or its gradient that a rank holds: from ``start`` on along ``dim``; if ``dim``
    is None, from ``start`` on in the flattened parameter."""

    values: Tensor
    start: int = 0
    dim: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another tensor of the parameter's shape; a view if that tensor is contiguous."""
        if self.dim is None:
            return whole.flatten().narrow(0, self.start, len(self.values))
        return whole.narrow(self.dim, self.start, self.values.shape[self.dim])


@dataclass(frozen=True)
class BackendSettings:
    """Settings that a training gives its backend.

    Attributes:
        moments: "kept": Adam's moments exist before the first step, as before every later step; "later": the
            first step's update allocates them.
        learning_rate: AdamW's learning rate, until :meth:`Optimizer.set_learning_rate` changes it.
        options: the backend's options, an instance of its ``options_type``; None: the defaults.
    """

    moments: Literal["kept", "later"] = "kept"
    learning_rate: float = 1e-4
    options: Options | None = None


class BytesInBackward(NamedTuple):
    """Bytes that a rank has in backward in addition to :meth:`Backend.held`.

    Attributes:
        whole: bytes for each element of all weights of the rank.
        shared: bytes for each element of the rank's gradient shards, from one micro-batch to the next.
        layer: bytes for each element of one layer.
    """

    whole: int = 0
    shared: int = 0
    layer: int = 0


class Backend(ABC):
    """Holds a module's gradients and its optimizer on one rank.

    A subclass sets up gradients and optimizer in :meth:`prepare`, and has no constructor of its own.

    Args:
        module: the rank's module, with its weights set or on the meta device. A backend that shards weights
            takes the module's parameters over.
        precision: one of :data:`PRECISIONS`.
    """

    name: ClassVar[str]
    #: whether a search for the fastest layout tries the backend; False if it serves only comparisons
    searched: ClassVar[bool] = True
    #: whether how the rank's buffers are cut depends on the weights of all layers; see :meth:`cuts`
    spans_layers: ClassVar[bool] = False
    #: whether the backend's ranks may be stages of a pipeline
    pipelined: ClassVar[bool] = True
    #: whether some of the weights may be frozen
    freezes: ClassVar[bool] = True
    #: whether a pipeline stage's output is freed when it has been sent
    frees_sent_outputs: ClassVar[bool] = False
    #: whether a pipeline stage keeps its received hidden states, and their gradient, until its next forward
    keeps_stage_inputs: ClassVar[bool] = False
    #: whether the host waits for its device after each exchange between stages of a pipeline
    host_waits_for_transfers: ClassVar[bool] = False
    #: whether the time in which gradient buffers are set to zero counts as a part of the step's forward; not
    #: where the buffers hold few gradients or none
    zeroes_in_step: ClassVar[bool] = False
    #: the frozen dataclass of the backend's options
    options_type: ClassVar[type[Options]] = Options
    #: the categories of :meth:`held` of which a rank holds only its part; None: the backend's options decide
    shares_out: ClassVar[frozenset[str] | None] = None
    options: Options

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        around: Composition,
        precision: Precision,
        settings: BackendSettings = BackendSettings(),
    ):
        self.module, self.strategy, self.around, self.precision = module, strategy, around, precision
        self.settings = settings
        self.options = settings.options or self.options_type()
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        #: weights that are not trained
        self.frozen = {p: name for name, p in module.named_parameters() if not p.requires_grad}
        self.frozen_names = frozenset(self.frozen.values())
        # a parameter that is split over ranks may overflow on one of them alone, as may an expert
        spread = {shard.axis for p in self.names if (shard := shard_of(p)) and not folds([shard.axis])}
        groups = [strategy.place.group(axis) for axis in sorted(spread)]
        if any(map(is_expert, self.names)):
            groups.append(strategy.place.group(*FOLDED_AXES))
        self.overflow_groups = [*groups, around.pp_group]
        self.optimizer = self.prepare()

    @classmethod
    def check_stages(cls, options: Any, tied: bool) -> None:
        """Raise :class:`Unsupported` if ranks cannot be stages of a pipeline under these options; ``tied``:
        the first and the last stage share an embedding."""
        if not cls.pipelined:
            raise Unsupported(
                f"the backend {cls.name} shards a whole model and has no pipeline stages",
                "use pp 1, or the backend ddp",
            )

    @classmethod
    def starts_on_meta(cls, options: Any) -> bool:
        """Whether, under these options, the backend takes over a module on the meta device."""
        return False

    @abstractmethod
    def prepare(self) -> Optimizer:
        """Set up gradients and shards before the first step; returns the optimizer of this rank's weights."""

    def make_optimizer(
        self,
        parameters: Sequence[Tensor],
        *,
        masters: bool = True,
        master_gradients: str = "made",
        shard_groups: Iterable[dist.ProcessGroup | None] = (),
    ) -> Optimizer:
        """An optimizer of these tensors by the backend's settings; with the option ``optimizer: host``, a
        host optimizer that updates each weight by itself.

        Args:
            masters: keep float32 copies if the precision has them; False if ``parameters`` are these copies.
            master_gradients: see :class:`Optimizer`.
            shard_groups: the groups of ranks that hold other parts of the weights.
        """
        settings = self.optimizer_settings(shard_groups)
        if self.on_host and parameters:
            return HostOptimizer(parameters, self.precision, self.host_layout, **settings)
        settings["foreach"] = getattr(self.options, "implementation", "fused") == "foreach"
        return Optimizer(
            parameters,
            self.precision if masters else replace(self.precision, master=False),
            master_gradients=master_gradients,
            **settings,
        )

    @property
    def host_layout(self) -> HostLayout:
        """The layout of a host optimizer's state in the host's memory."""
        return EACH_WEIGHT

    @property
    def on_host(self) -> bool:
        """Whether the optimizer is on the host; False for backends without the option ``optimizer``."""
        return isinstance(self.options, OptimizerOptions) and self.options.optimizer == "host"

    def optimizer_settings(self, shard_groups: Iterable[dist.ProcessGroup | None] = ()) -> dict[str, Any]:
        """Keyword arguments of every optimizer; ``shard_groups`` as in :meth:`make_optimizer`."""
        return {
            "with_moments": self.settings.moments == "kept",
            "overflow_groups": [*self.overflow_groups, *shard_groups],
            "lr": self.settings.learning_rate,
        }

    def summed(self) -> Iterator[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]:
        """Yields (group, parameters whose gradients are summed over it); None: only this rank."""
        for axes, parameters in self.by_axes():
            yield self.around.gradient_group(axes), parameters

    def by_axes(self) -> Iterable[tuple[tuple[str, ...], list[nn.Parameter]]]:
        """The parameters by the axes of the strategy over which, in addition to the replicas, their gradients
        are summed; for a backend whose groups are parts of these ranks (:meth:`Place.subgroup`)."""
        return by_partial_axes(self.names, self.strategy).items()

    @abstractmethod
    def zero(self) -> None:
        """Before a step: free the gradients of the step before, or set them to zero."""

    @property
    def host_reads_losses(self) -> bool:
        """Whether the host waits for each micro-batch's loss."""
        return False

    def kind_of_backward(self, number: int) -> int:
        """A key of a step's backward through the last stage, equal for backwards of equal work."""
        return 0

    def begin_last_backward(self, stage: nn.Module) -> None:  # noqa: B027  # most have nothing to begin
        """Called before the last backward of a step through the ``module``, or through one of its stages:
        from here on gradients may be sent.

        A backend must learn only from this call which backward is the last. A backend that counted backwards
        would behave differently in a trace, which runs only a few of the equal ones, and its bytes would
        differ from its closed form, which `spbench verify` shows.
        """

    def end_last_backward(self, stage: nn.Module) -> None:  # noqa: B027  # most sum gradients within it
        """Called after the last backward of a step through the ``module``, or through one of its stages."""

    def begin_gathering(self, stage: nn.Module) -> None:  # noqa: B027  # most have nothing to begin
        """Called in a step's forward, when all stages of a pipeline may begin to gather the weights of
        ``stage``, one of a rank's runs of layers."""

    @abstractmethod
    def synchronize(self) -> None:
        """After all backward passes: sum the gradients that this rank holds over their groups."""

    def step(self) -> None:
        """Update the weights from the gradients."""
        self.optimizer.step()

    @property
    def gradient_norm(self) -> Tensor | None:
        """After :meth:`step`: the norm [] of the gradients of all ranks, each counted once, before they were
        clipped; None for a backend that does not clip them."""
        return None

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors held between steps, by the memory meter's category: ``parameters``, ``gradients`` and
        ``optimizer_state``."""
        return {
            "parameters": [*self.names, *self.frozen, *scales_in(self.module)],
            "gradients": self.held_gradients(),
            "optimizer_state": self.optimizer.tensors(),
        }

    @abstractmethod
    def held_gradients(self) -> list[Tensor]:
        """The gradients, and buffers of gradients, that are held between steps."""

    def gradient_parts(self) -> dict[str, HeldPart]:
        """After :meth:`synchronize`: the part of each gradient that this rank holds, by parameter name."""
        return {name: HeldPart(p.grad.flatten()) for p, name in self.names.items() if p.grad is not None}

    def gradient_places(self) -> dict[str, HeldPart]:
        """The parts of weights whose gradients :meth:`gradient_parts` returns, by parameter name."""
        parts = self.weight_parts()
        return {name: part for name, part in parts.items() if name not in self.frozen_names}

    def weight_parts(self) -> dict[str, HeldPart]:
        """Between steps: the part of each parameter that this rank holds, by name."""
        trained = {name: HeldPart(p.detach().flatten()) for p, name in self.names.items()}
        return trained | self.frozen_parts()

    def frozen_parts(self) -> dict[str, HeldPart]:
        """The part of each frozen weight that this rank holds, by name."""
        return {name: HeldPart(p.detach().flatten()) for p, name in self.frozen.items()}

    @classmethod
    def cuts(cls, step: PlannedStep) -> Hashable:
        """A key of how the rank's buffers of several layers' weights or gradients are cut over buckets and
        ranks, and padded. If two depths of a model have equal keys, their buffers differ only in length.
        None: there are no such buffers."""
        return step.shapes() if cls.spans_layers else None

    @classmethod
    def shares_whole_weights(cls, options: Any) -> bool:
        """Whether, under these options, each rank updates some whole weights, or keeps the whole gradients of
        some, so that ranks hold, and may send, different numbers of bytes."""
        return False

    @classmethod
    def updated_elements(cls, step: PlannedStep, places: Sequence[Place]) -> list[int]:
        """The number of elements that the rank at each place has whole (:meth:`shares_whole_weights`)."""
        module, elements = step.build(), [0] * len(places)
        for axes, parameters in by_partial_axes(trained_parameters(module), step.strategy).items():
            summed = summed_axes(axes)
            by_rank = cls.whole_weights(module, parameters, places[0].size(*summed))
            elements = [n + by_rank[place.rank(*summed)] for n, place in zip(elements, places, strict=True)]
        return elements

    @classmethod
    def whole_weights(
        cls, module: nn.Module, parameters: list[nn.Parameter], ranks: int
    ) -> Mapping[int, int]:
        """For each rank, the elements of the weights that it has whole, if ``ranks`` share out parameters."""
        raise NotImplementedError

    @classmethod
    def gradient_dtype(cls, precision: Precision, options: Any) -> torch.dtype:
        """The dtype of the gradients that the backend holds and sums; ``options`` are of ``options_type``."""
        return precision.parameters

    @classmethod
    def tied_bytes(cls, step: PlannedStep, elements: int) -> int:
        """Bytes of the gradient of a tied embedding on a rank that has ``elements`` of its elements."""
        return elements * cls.gradient_dtype(step.precision, step.options).itemsize

    @classmethod
    def bytes_in_backward(cls, precision: Precision, options: Any, staged: bool) -> BytesInBackward:
        """The bytes per element that a rank has in backward in addition to :meth:`held`.

        Args:
            options: an instance of ``options_type``.
            staged: whether the rank holds stages of a pipeline.
        """
        return BytesInBackward()

    @classmethod
    @abstractmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        """The closed form: yields the messages of the backend on one rank in a step."""
