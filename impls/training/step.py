"""One training step, as any engine runs it: forward, backward, gradient sync, optimizer.

:class:`Inference` runs only the forward pass of a trained model, without gradients and optimizer.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spbench.impls.backends.backend import BackendSettings
from spbench.impls.backends.optimizer import PRECISIONS, Optimizer, Precision, default_dtype
from spbench.impls.composition import Composition, chunks_of
from spbench.impls.kernels.fp8_projection import begin_step
from spbench.impls.options import set_options
from spbench.impls.registries import DEFAULT_BACKEND, backend_class
from spbench.impls.strategies.base import Site, Strategy, shard_of
from spbench.impls.training.interleaved import InterleavedPipeline
from spbench.impls.training.pipeline import Pipeline, StageRun
from spbench.impls.training.turns import Turns

__all__ = [
    "PHASES",
    "PRECISIONS",
    "Optimizer",
    "Precision",
    "Training",
    "default_dtype",
    "initialize",
    "training_sites",
]

PHASES = ("forward", "backward", "gradient_sync", "optimizer")
SCHEDULES = ("1f1b", "gpipe", "interleaved")


def training_sites(precision: Precision, sites: Iterable[Site] = ()) -> list[Site]:
    """The sites of the step itself, in addition to the sites of a rank's layers."""
    experts = any(site.dims.get("experts") for site in sites if site.kind == "parameters")
    return [Site("overflow_flag", 1, {"experts": 1} if experts else {})] if precision.loss_scale else []


def initialize(module: nn.Module, seed: int, *, deviation: float = 0.02, everything: bool = False) -> None:
    """Set the module's weights to those that a single device has for this seed, each rank its own part.

    Matrices are normal with that standard deviation, drawn whole in float64 from a generator seeded by
    the parameter's name, then cut. They are drawn on the CPU, so that every device has the same values.
    ``everything``: such noise is added to vectors too (biases, norms).
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 and not everything:
            continue
        shard = shard_of(parameter)
        shape = shard.full_shape(parameter.shape) if shard else list(parameter.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full = torch.randn(shape, generator=generator, dtype=torch.float64) * deviation
        values = (shard.of(full) if shard else full).to(parameter.device)
        with torch.no_grad():
            if parameter.ndim < 2:
                parameter.copy_(parameter.double() + values)  # rounded once, whatever the dtype
            else:
                parameter.copy_(values)


class Training:
    """A module with its backend and pipeline schedule, which runs training steps.

    Args:
        module: maps a dict of this rank's inputs to a dict with ``loss``.
        strategy: the strategy that the module was built with.
        precision: one of PRECISIONS.
        backend: name of a backend, which sums gradients and updates weights.
        backend_options: the backend's options that differ from their defaults, by name.
        around: data and pipeline parallelism; None for one replica and one stage.
        micro_batches: number of parts of the batch that are run one after another.
        schedule: the pipeline's schedule, one of SCHEDULES; "interleaved" if and only if ``around`` has
            several stages a rank.
        turns: the turns of that schedule; None: an interleaved one has groups of as many micro-batches as
            there are ranks, another runs all micro-batches in their order.
        moments, learning_rate: see :class:`BackendSettings`.

    Raises:
        KeyError: the backend or an option is unknown; the message lists the known names.
        ValueError: there is no such schedule, or it is for another number of stages a rank.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        precision: Precision,
        *,
        moments: Literal["kept", "later"] = "kept",
        backend: str = DEFAULT_BACKEND,
        backend_options: Mapping[str, Any] | None = None,
        around: Composition | None = None,
        micro_batches: int = 1,
        schedule: str = "1f1b",
        turns: Turns | None = None,
        learning_rate: float = 1e-4,
    ):
        self.module, self.strategy, self.micro_batches = module, strategy, micro_batches
        self.around = around = around or Composition()
        cls = backend_class(backend)
        options = set_options(cls.options_type(), backend_options, f"backend {backend}")
        settings = BackendSettings(moments, learning_rate, options)
        self.backend = cls(module, strategy, around, precision, settings)
        self.pipeline = _pipeline(
            schedule,
            around,
            [
                StageRun(each, stage, self.backend)
                for each, stage in zip(chunks_of(module), around.stages, strict=True)
            ],
            turns,
            micro_batches,
        )
        self.steps = 0

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the weights that this rank holds."""
        return self.backend.optimizer

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors that live between steps, by category (:meth:`Backend.held`)."""
        return self.backend.held()

    def step(
        self,
        inputs: Mapping[str, Tensor],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> Tensor:
        """One step on this rank's inputs; the context ``phase(name)`` is entered around each of PHASES,
        around forward and backward once for each micro-batch.

        Returns this rank's share of the loss, detached; on a pipeline, of the last stage.
        """
        loss = self.gradients(inputs, phase)
        with phase("optimizer"):
            self.backend.step()
        return loss

    def gradients(
        self,
        inputs: Mapping[str, Tensor],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> Tensor:
        """A step without the optimizer; returns the loss of :meth:`step`."""
        self.strategy.random.begin_step(self.steps)
        self.strategy.losses.begin_step(self.micro_batches, self.optimizer.scaled)
        for stage in chunks_of(self.module):
            if getattr(stage, "casts_weights", False):
                begin_step(stage, self.steps)
        self.steps += 1
        self.optimizer.begin()  # before the first phase, so that set-up counts in no step's time
        with phase("forward") if self.backend.zeroes_in_step else nullcontext():
            self.backend.zero()
        loss = self.pipeline.run(self._split(inputs), self.optimizer.scaled, phase)
        with phase("gradient_sync"):
            self.backend.synchronize()
        return loss

    def _split(self, inputs: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """The inputs of each micro-batch: parts along the first dim of inputs that have a batch."""
        n = self.micro_batches
        shared = self.module.unbatched if n > 1 else ()
        parts = {name: [x] * n if name in shared else x.chunk(n) for name, x in inputs.items()}  # type: ignore[operator]
        return [{name: part[i] for name, part in parts.items()} for i in range(n)]


def _pipeline(
    schedule: str,
    around: Composition,
    runs: Sequence[StageRun],
    turns: Turns | None,
    micro_batches: int,
) -> Pipeline | InterleavedPipeline:
    """The pipeline that runs micro-batches through a rank's stages.

    Raises:
        ValueError: there is no such schedule, or it is for another number of stages a rank.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, not {schedule!r}")
    if (schedule == "interleaved") != (len(runs) > 1):
        raise ValueError(f"the schedule {schedule} does not run {len(runs)} stages a rank")
    turns = turns or Turns.of(schedule, around.stage, len(runs), micro_batches)
    return InterleavedPipeline(runs, around, turns) if len(runs) > 1 else Pipeline(runs[0], around, turns)


class Inference:
    """A module that runs forward passes; engines run it like a :class:`Training`.

    Args:
        module: maps a dict of this rank's inputs to a dict of outputs.
        around: the data parallelism around the module.
    """

    def __init__(self, module: nn.Module, around: Composition):
        self.module, self.around = module, around

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors held between steps, by category (:meth:`Backend.held`): only parameters."""
        return {"parameters": list(self.module.parameters())}

    def step(
        self,
        inputs: Mapping[str, Tensor],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> dict[str, Tensor]:
        """The outputs for this rank's inputs."""
        with torch.no_grad(), phase("forward"):
            outputs: dict[str, Tensor] = self.module(inputs)
            return outputs
