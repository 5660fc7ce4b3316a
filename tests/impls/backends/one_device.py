"""A rank's training by a backend beside that of one device, and what it sends beside the closed form."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.setup import build_training, rank_inputs
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.judged import relative_errors
from spbench.bench.measurement import Measurement
from spbench.impls.backends.backend import Backend, HeldPart
from spbench.impls.backends.optimizer import PRECISIONS, default_dtype
from spbench.impls.collectives import all_reduce
from spbench.impls.models.model import Model
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy, shard_of
from spbench.impls.training.step import Training, initialize
from tests.cells import make_cell

LENGTH, STEPS = 24, 2
#: reordered sums make errors of 1e-14, a wrong factor or a missing part far more than this
LIMIT = 1e-10
#: most of its memory is weights and what belongs to them
HEAVY = {"layers": 4, "hidden": 192, "inner": 512, "vocabulary": 1024}
set_weights = partial(initialize, seed=5, deviation=0.2, everything=True)


def cell(backend: str, strategy: str = "lasp", micro_batches: int = 1, **changed: Any) -> Cell:
    model = {"lasp": "tnl-tiny", "ulysses": "causal-transformer-tiny"}.get(strategy, "bert-tiny")
    training = {"backend": backend, "micro_batches": micro_batches}
    return make_cell(model, strategy, {}, 12, LENGTH, "fp64", **{"training": training, **changed})


def trained(
    backend: str,
    strategy: str,
    sizes: Mapping[str, int],
    micro_batches: int = 1,
    options: Mapping[str, Any] = MappingProxyType({}),
    **changed: Any,
) -> Cell:
    """A cell of a backend with further options, on a mesh in the order of its sizes."""
    training = {"backend": backend, "micro_batches": micro_batches, **options}
    mesh = [axis for axis in sizes if axis not in ("ep", "etp")]
    return cell(backend, strategy, **{"sizes": sizes, "mesh": mesh, "training": training, **changed})


@dataclass(frozen=True)
class ReferenceStep:
    """A step of one device, by parameter: gradients before their norm was clipped, and updated weights."""

    gradients: dict[str, Tensor]
    norm: Tensor
    weights: dict[str, Tensor]


def reference_step(reference: Training, batch: dict[str, Tensor], largest: float) -> ReferenceStep:
    """A step of one device with gradients clipped to a norm, unless that is 0."""
    reference.gradients(batch)
    parameters = dict(reference.module.named_parameters())
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(parameters.values(), largest or float("inf"))
    reference.backend.step()
    return ReferenceStep(gradients, norm, {name: p.detach().clone() for name, p in parameters.items()})


def whole_batch(model: Model, step: int) -> dict[str, Tensor]:
    batch = model.inputs(12, LENGTH, torch.Generator().manual_seed(step))
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def as_it_is(reference: Training) -> None:
    """Leaves the optimizer of one device as it is."""


@lru_cache(maxsize=64)
def _reference_steps(pickled: bytes) -> list[ReferenceStep]:
    """The steps of one device, of the pickled model, largest norm and change of its optimizer: a rank
    compares one backend and fault after another with the same ones. Nobody writes to them."""
    model, largest, updated = pickle.loads(pickled)
    with default_dtype(torch.float64):
        whole = model.build(Strategy(), LENGTH)
    set_weights(whole)
    reference = Training(whole, Strategy(), PRECISIONS["fp64"])
    updated(reference)
    steps = []
    for step in range(STEPS):
        reference.optimizer.set_learning_rate(0.01)
        steps.append(reference_step(reference, whole_batch(model, step), largest))
    return steps


class _Step:
    """The training of this rank beside that of one device (``reference``, by step).

    Attributes:
        shards: by parameter, the part that the strategy gives this rank (None: all), and its shape.
        gradients: by parameter, what this rank held of them as the last step updated.
        places: where in the strategy's part these are.
    """

    def __init__(
        self, mesh: DeviceMesh, asked: Cell, cls: type[Backend], updated: Callable[[Training], None]
    ):
        self.model = model_preset(asked.model, asked.model_options)
        self.shards: dict[str, tuple[Any, torch.Size]] = {}
        self.gradients: dict[str, Tensor] = {}
        self.places: dict[str, HeldPart] = {}

        def noted(module: Any) -> None:
            set_weights(module)
            self.shards |= {name: (shard_of(p), p.shape) for name, p in module.named_parameters()}

        with mock.patch("spbench.impls.training.step.backend_class", return_value=cls):
            self.training, self.strategy, self.around = build_training(asked, mesh, noted)
        largest = getattr(self.training.backend.options, "clip_grad", 0)
        self.reference = _reference_steps(pickle.dumps((self.model, largest, updated)))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if name == "optimizer":
            parts = self.training.backend.gradient_parts()
            self.gradients |= {n: part.values.clone() for n, part in parts.items()}
            self.places |= self.training.backend.gradient_places()
        yield

    def _mine(self, name: str, x: Tensor | None, parts: Mapping[str, HeldPart]) -> Tensor:
        assert x is not None
        shard, _ = self.shards[name]
        of_strategy: Tensor = parts[name].of(shard.of(x) if shard else x)
        return of_strategy.flatten()

    def errors(self, step: int) -> dict[str, float]:
        """Errors of gradients, updated weights and the norm, after one more step of both."""
        batch, reference = whole_batch(self.model, step), self.reference[step]
        self.training.optimizer.set_learning_rate(0.01)
        self.training.step(rank_inputs(self.model, self.strategy, self.around, batch), self._phase)
        errors: dict[str, float] = {}
        if self.training.backend.gradient_norm is not None:
            name = f"norm {step} of all"
            errors |= relative_errors({name: reference.norm}, {name: self.training.backend.gradient_norm})
        parts = self.training.backend.weight_parts()
        held = {name: part.values.flatten() for name, part in parts.items()}
        expected = {name: self._mine(name, reference.weights[name], parts) for name in parts}
        errors |= {f"weight {step} {name}": e for name, e in relative_errors(expected, held).items()}
        expected = {name: self._mine(name, reference.gradients[name], self.places) for name in self.places}
        held = {name: x.flatten() for name, x in self.gradients.items()}
        return errors | {f"gradient {step} {name}": e for name, e in relative_errors(expected, held).items()}

    def elements(self) -> dict[str, float]:
        """Infinity for each weight of which the parts of all ranks do not make a whole: equal parts would
        show little."""
        parts, errors = self.training.backend.weight_parts(), {}
        for name, p in self.reference[0].weights.items():
            count = torch.zeros_like(p, dtype=torch.int64)
            if name in parts:
                shard, shape = self.shards[name]
                held = torch.zeros(shape, dtype=torch.int64)
                parts[name].of(held).add_(1)
                (shard.of(count) if shard else count).add_(held)
            all_reduce(count, self.around.place.group("dp", *self.strategy.nested_axes))
            somewhere = 1 if self.around.stage.count == 1 else 0  # other stages have others
            errors[f"elements {name}"] = 0.0 if count.min() == count.max() >= somewhere else float("inf")
        return errors


def errors_of_rank(
    mesh: DeviceMesh, asked: Cell, cls: type[Backend], updated: Callable[[Training], None] = as_it_is
) -> dict[str, float]:
    """Relative errors of what this rank holds of each step's gradients and updated weights, from those of
    one device, whose optimizer ``updated`` may change."""
    both = _Step(mesh, asked, cls, updated)
    errors: dict[str, float] = {}
    for step in range(STEPS):
        errors |= both.errors(step)
    return errors | both.elements()


def assert_right(
    pool: RankPool, asked: Cell, cls: type[Backend], updated: Callable[[Training], None] = as_it_is
) -> None:
    for errors in pool.run(asked.mesh_sizes, errors_of_rank, asked, cls, updated):
        assert max(errors.values()) < LIMIT, max(errors, key=errors.__getitem__)


def assert_first_wrong(pool: RankPool, asked: Cell, fault: type[Backend], where: str) -> None:
    """The fault first shows ``where`` it was planted: what was computed before that is right."""
    for errors in pool.run(asked.mesh_sizes, errors_of_rank, asked, fault):
        wrong = {name.rsplit(" ", 1)[0] for name, error in errors.items() if error > LIMIT}
        in_order = [f"{what} {step}" for step in range(STEPS) for what in ("gradient", "weight")]
        assert next(name for name in in_order if name in wrong) == where
        assert max(error for name, error in errors.items() if name.startswith(where)) > 1e-3
        assert not any(name.startswith("elements") for name in wrong)


def heavy(backend: str, n: int) -> Cell:
    return cell(backend, batch=n, sizes={"dp": n}, precision="fp16", model_options=HEAVY)


@cache
def heavy_run(backend: str, n: int) -> Measurement:
    return VirtualEngine().measure(heavy(backend, n))
