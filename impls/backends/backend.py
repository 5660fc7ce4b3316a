"""The interface between a training step and its data-parallel backend.

A gradient of which the ranks along axes of the strategy each hold a part is summed over them and over all
replicas at once; any other over the replicas alone. So a backend sees sets of parameters, each with the group
that its gradients are summed over: at most two for a strategy of one axis, up to four for strategies around
each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.backends.optimizer_options import EACH_WEIGHT, HostLayout, OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.composition import Composition, by_partial_axes
from spbench.impls.folding import FOLDED_AXES, folds
from spbench.impls.kernels.packed_weights import scales_in
from spbench.impls.layout import Unsupported, is_expert
from spbench.impls.options import Options
from spbench.impls.place import Place
from spbench.impls.strategies.base import Strategy, shard_of
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class HeldPart:
    """The part of a parameter or its gradient that a rank holds: from ``start`` on along ``dim``; without
    ``dim``, from ``start`` on in the flattened whole."""

    values: Tensor
    start: int = 0
    dim: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The same part of a whole tensor (a view of a contiguous one)."""
        if self.dim is None:
            return whole.flatten().narrow(0, self.start, len(self.values))
        return whole.narrow(self.dim, self.start, self.values.shape[self.dim])


@dataclass(frozen=True)
class BackendSettings:
    """Settings of a training for its backend.

    Attributes:
        moments: "kept": Adam's moments exist before the first step, as they do in every later one; "later":
            the first step's update makes them.
        learning_rate: of AdamW, until :meth:`Optimizer.set_learning_rate` changes it.
        options: the backend's own, an instance of its ``options_type``; None: the defaults.
    """

    moments: Literal["kept", "later"] = "kept"
    learning_rate: float = 1e-4
    options: Options | None = None


class BytesInBackward(NamedTuple):
    """Bytes that a rank has in backward beside :meth:`Backend.held`.

    Attributes:
        whole: of each element of all its weights.
        shared: of each that it has where gradients are shared out, from one micro-batch to the next.
        layer: of each element of a layer.
    """

    whole: int = 0
    shared: int = 0
    layer: int = 0


class Backend(ABC):
    """Holds a module's gradients and its optimizer on one rank.

    A subclass says in :meth:`prepare` where they are held; its constructor is this one.

    Args:
        module: with its weights set, or on the meta device. A backend that shards them takes its parameters
            over.
        precision: one of :data:`PRECISIONS`.
    """

    name: ClassVar[str]
    #: whether a search for the fastest layout looks at it; not at one that is here for a comparison alone
    searched: ClassVar[bool] = True
    #: whether its ranks may be stages of a pipeline
    pipelined: ClassVar[bool] = True
    #: whether some of the weights may be frozen
    freezes: ClassVar[bool] = True
    #: whether a pipeline stage's output is freed when it has been sent
    frees_sent_outputs: ClassVar[bool] = False
    #: whether a pipeline stage keeps the last hidden states that it received, and their gradient, until it
    #: runs others
    keeps_stage_inputs: ClassVar[bool] = False
    #: whether the host waits for its device after each exchange between stages of a pipeline
    host_waits_for_transfers: ClassVar[bool] = False
    #: whether setting its buffers of gradients to zero takes a part of the step's forward; it does not where
    #: these hold few gradients or none
    zeroes_in_step: ClassVar[bool] = False
    #: a frozen dataclass of what may be chosen about this backend alone
    options_type: ClassVar[type[Options]] = Options
    #: the categories of :meth:`held` of which a rank holds its part alone; None: not by the choice of the
    #: backend
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
        """Raise :class:`Unsupported` where ranks cannot be stages of a pipeline, with options of
        ``options_type``; ``tied``: the first and the last stage share an embedding."""
        if not cls.pipelined:
            raise Unsupported(
                f"the backend {cls.name} shards a whole model and has no pipeline stages",
                "use pp 1, or the backend ddp",
            )

    @classmethod
    def starts_on_meta(cls, options: Any) -> bool:
        """Whether the backend takes over a module on the meta device, with options of ``options_type``."""
        return False

    @abstractmethod
    def prepare(self) -> Optimizer:
        """Take the module over, before its first step; returns the optimizer that updates the weights."""

    def make_optimizer(
        self,
        parameters: Sequence[Tensor],
        *,
        masters: bool = True,
        master_gradients: str = "made",
        shard_groups: Iterable[dist.ProcessGroup | None] = (),
    ) -> Optimizer:
        """An optimizer of these tensors by the settings; with the option ``optimizer: host``, one of each
        weight on the host.

        Args:
            masters: keep float32 copies where the precision asks for them; False where the tensors are these
                copies.
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
        """How the host holds the state of an optimizer there."""
        return EACH_WEIGHT

    @property
    def on_host(self) -> bool:
        """Whether the optimizer is on the host; False for backends without that option."""
        return isinstance(self.options, OptimizerOptions) and self.options.optimizer == "host"

    def optimizer_settings(self, shard_groups: Iterable[dist.ProcessGroup | None] = ()) -> dict[str, Any]:
        """Arguments of every optimizer; ``shard_groups`` as in :meth:`make_optimizer`."""
        return {
            "with_moments": self.settings.moments == "kept",
            "overflow_groups": [*self.overflow_groups, *shard_groups],
            "lr": self.settings.learning_rate,
        }

    def summed(self) -> Iterator[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]:
        """The parameters by the group that their gradients are summed over (None: a rank alone)."""
        for axes, parameters in self.by_axes():
            yield self.around.gradient_group(axes), parameters

    def by_axes(self) -> Iterable[tuple[tuple[str, ...], list[nn.Parameter]]]:
        """The parameters by the axes of the strategy over which their gradients are summed, beside the
        replicas; for a backend whose groups are parts of these ranks (:meth:`Place.subgroup`)."""
        return by_partial_axes(self.names, self.strategy).items()

    @abstractmethod
    def zero(self) -> None:
        """Forget the gradients of the step before, or set them to zero."""

    @property
    def host_reads_losses(self) -> bool:
        """Whether the host waits for each micro-batch's loss."""
        return False

    def begin_last_backward(self, stage: nn.Module) -> None:  # noqa: B027  # most have nothing to begin
        """Called before the last backward of a step through the ``module``, or through one of its stages:
        from here on gradients may be sent.

        A backend must learn from this call alone which backward is the last. If it counted its backwards, it
        would behave differently in a trace, which runs only a few of the equal ones. Its bytes would then
        differ from its closed form, which `spbench verify` shows.
        """

    def end_last_backward(self, stage: nn.Module) -> None:  # noqa: B027  # most sum gradients within it
        """Called after the last backward of a step through the ``module``, or through one of its stages."""

    def begin_gathering(self, stage: nn.Module) -> None:  # noqa: B027  # most have nothing to begin
        """Called in a step's forward, where all stages of a pipeline may begin to gather the weights of one
        of their runs of layers."""

    @abstractmethod
    def synchronize(self) -> None:
        """After all backward passes, make the gradients that this rank holds sums over their groups."""

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
        """Gradients, and buffers of them, held between steps."""

    def gradient_parts(self) -> dict[str, HeldPart]:
        """After :meth:`synchronize`: the part of each parameter's gradient that this rank holds."""
        return {name: HeldPart(p.grad.flatten()) for p, name in self.names.items() if p.grad is not None}

    def gradient_places(self) -> dict[str, HeldPart]:
        """The parts of weights whose gradients :meth:`gradient_parts` has."""
        parts = self.weight_parts()
        return {name: part for name, part in parts.items() if name not in self.frozen_names}

    def weight_parts(self) -> dict[str, HeldPart]:
        """Between steps: the part of each parameter that this rank holds."""
        trained = {name: HeldPart(p.detach().flatten()) for p, name in self.names.items()}
        return trained | self.frozen_parts()

    def frozen_parts(self) -> dict[str, HeldPart]:
        """The part of each weight that is not trained that this rank holds."""
        return {name: HeldPart(p.detach().flatten()) for p, name in self.frozen.items()}

    @classmethod
    def cuts(cls, step: PlannedStep) -> Hashable:
        """How buffers of several layers' weights or gradients are cut over buckets and ranks, and padded, for
        the rank of the step. If two depths of a model have equal cuts, the deeper one's buffers are longer
        and otherwise the same. None: there are no such buffers."""
        return None

    @classmethod
    def shares_whole_weights(cls, options: Any) -> bool:
        """Whether each rank updates some whole weights, with options of ``options_type``: ranks at unlike
        places hold and send unlike amounts."""
        return False

    @classmethod
    def updated_elements(cls, step: PlannedStep, places: Sequence[Place]) -> list[int]:
        """Elements that the rank at each of these places updates, where ranks share out whole weights."""
        raise NotImplementedError

    @classmethod
    def gradient_dtype(cls, precision: Precision, options: Any) -> torch.dtype:
        """The dtype of the gradients that the backend holds and sums; ``options`` are of ``options_type``."""
        return precision.parameters

    @classmethod
    def tied_bytes(cls, step: PlannedStep, elements: int) -> int:
        """Bytes that a rank holds of the gradient of a tied embedding, of which it has so many elements."""
        return elements * cls.gradient_dtype(step.precision, step.options).itemsize

    @classmethod
    def bytes_in_backward(cls, precision: Precision, options: Any, staged: bool) -> BytesInBackward:
        """What a rank has in backward beside :meth:`held`.

        Args:
            options: of ``options_type``.
            staged: as stages of a pipeline have it.
        """
        return BytesInBackward()

    @classmethod
    @abstractmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        """The closed form of the traffic of a rank."""
