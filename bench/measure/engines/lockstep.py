"""The lockstep engine: all ranks of a cell in one process, in turns, and their errors against float64.

The strategy's own code runs on all ranks (:mod:`measure.processes.lockstep_ranks`), in the cell's precision.
The reference is one device in float64, with the same weights and inputs, whose values the cell's precision
can hold, so that only arithmetic makes errors. An error is that of a whole tensor, over all ranks:
||x - ref|| / ||ref||.

- For a model with weights, the engine compares the loss and the gradients as the backend leaves them for the
  optimizer: all gradients as one vector, and the gradient with the largest error.
- For a model without weights, such as one attention, the engine compares the outputs and the gradients of the
  inputs. The gradient of the outputs is drawn at random.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench import impls
from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.measure.engines.distributed import SEED, learned, losses_of_rank
from spbench.bench.measure.engines.engine import Engine
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.setup import build_module, build_training, rank_inputs
from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks
from spbench.bench.measurement import Measurement

#: standard deviation of weights: 0.02 suits hidden sizes of 768 and more, but these models are small
DEVIATION = 0.08

#: (the square of the distance from the reference, the square of the reference's norm)
Squares = tuple[float, float]
#: (a rank's part of a tensor, a function that takes the same part of the whole tensor)
Computed = tuple[Tensor, Callable[[Tensor], Tensor]]


class LockstepEngine(Engine):
    """Runs all ranks of a cell in turns in this process, and computes every value, but measures no time."""

    name = "lockstep"
    summary = "every rank in turn in one process: errors of outputs and gradients against float64"
    real_tensors = True

    def check(self, cell: Cell) -> None:
        super().check(cell)
        if cell.learning is None and cell.sizes.pp > 1:
            raise impls.Unsupported("the engine lockstep compares no pipeline stages", "use pp 1")
        if cell.learning is None and _has_weights(cell) and cell.training.step == "inference":
            raise impls.Unsupported("the engine lockstep compares gradients", "leave training.step out")

    def measure(self, cell: Cell) -> Measurement:
        """A measurement with :attr:`Measurement.errors`; status numerics if an error is not finite.

        Raises:
            Unsupported: the strategy cannot run these sizes.
        """
        self.check(cell)
        plan(cell)
        ranks, values = LockstepRanks(), drawn(cell)
        (reference,) = ranks.run({}, on_one_device, cell, values)
        by_rank = ranks.run(cell.mesh_sizes, squares_of_rank, cell, replace(values, reference=reference))
        # a rank may hold only some of the experts, so ranks have tensors of other names
        names = dict.fromkeys(itertools.chain.from_iterable(by_rank))
        squares = {name: [of_rank[name] for of_rank in by_rank if name in of_rank] for name in names}
        errors = {name: _error(each) for name, each in squares.items()}
        shown = dict(_summed_up(errors, squares) if _has_weights(cell) else errors)
        for name, error in shown.items():
            if not math.isfinite(error):
                return Measurement(status="numerics", reason=f"{name} is not finite")
        return Measurement(errors=shown)

    def learn(self, cell: Cell) -> Measurement:
        """Train on real data, and return the losses of each step, as of real ranks but for the order of sums.

        Raises:
            Unsupported: the strategy cannot run these sizes, or there is no data for the model.
        """
        return learned(cell, lambda: LockstepRanks().run(cell.mesh_sizes, losses_of_rank, cell)[0])


def _has_weights(cell: Cell) -> bool:
    return impls.model_preset(*cell.model_arguments).has_weights


def _error(squares: list[Squares]) -> float:
    """The relative error of a tensor, from each rank's squares; the absolute one if the reference is 0."""
    distance, norm = (sum(each) for each in zip(*squares, strict=True))
    return math.sqrt(distance / norm) if norm else math.sqrt(distance)


def _summed_up(
    errors: Mapping[str, float], squares: Mapping[str, list[Squares]]
) -> Iterator[tuple[str, float]]:
    """(name, relative error) of the loss, of all gradients as one vector, and of the worst gradient."""
    yield "loss", errors["loss"]
    gradients = [name for name in errors if name != "loss"]
    yield "gradients", _error([each for name in gradients for each in squares[name]])
    yield "worst_gradient", max((errors[name] for name in gradients), key=lambda x: (math.isnan(x), x))


def single(cell: Cell) -> Cell:
    """The reference cell: the same computation on one device in float64, without the model's rounding."""
    training = TrainingOptions(step=cell.training.step)
    rounding = impls.model_preset(*cell.model_arguments).rounding
    change = {"strategy": "single", "sizes": Sizes(), "mesh": None, "strategy_options": {}}
    change["model_options"] = {k: v for k, v in cell.model_options.items() if k not in rounding}
    return cell.model_copy(update={**change, "precision": "fp64", "training": training})


@dataclass(frozen=True)
class Values:
    """The whole tensors from which a cell and its reference start.

    Attributes:
        weights, inputs: tensors by name, with values that the cell's precision can hold.
        reference: the tensors that one device computes from these in float64, by name; empty until then.
    """

    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    reference: Mapping[str, Tensor] = field(default_factory=dict)


def drawn(cell: Cell) -> Values:
    """Draw the weights and the inputs of a cell, the same for every strategy and size."""
    model, dtype = impls.model_preset(*cell.model_arguments), impls.PRECISIONS[cell.precision].parameters
    batch, seq_len = cell.shape
    with impls.default_dtype(torch.float64):
        module = model.build(impls.Strategy(), seq_len)
    impls.initialize(module, SEED, deviation=DEVIATION, everything=True)
    inputs = model.inputs(batch, seq_len, torch.Generator().manual_seed(SEED))
    if not model.has_weights:
        inputs = {name: x.to(dtype) for name, x in inputs.items()}
    return Values({name: p.detach().to(dtype) for name, p in module.named_parameters()}, inputs)


def on_one_device(mesh: DeviceMesh, cell: Cell, values: Values) -> dict[str, Tensor]:
    """The whole tensors that one device computes in float64, by name: the reference of ``cell``."""
    return {name: x.double() for name, (x, _) in _computed(mesh, single(cell), values)}


def squares_of_rank(mesh: DeviceMesh, cell: Cell, values: Values) -> dict[str, Squares]:
    """For this rank's part of each tensor, by name, the squares of its distance and of the reference."""
    return {
        name: _squares(x.double(), mine(values.reference[name]).reshape(x.shape))
        for name, (x, mine) in _computed(mesh, cell, values)
    }


def _squares(x: Tensor, reference: Tensor) -> Squares:
    return (x - reference).square().sum().item(), reference.square().sum().item()


def _computed(mesh: DeviceMesh, cell: Cell, values: Values) -> Iterator[tuple[str, Computed]]:
    """(name, :data:`Computed`) for each tensor of a rank that is compared with the reference."""
    return (_trained if _has_weights(cell) else _called)(mesh, cell, values)


def _trained(mesh: DeviceMesh, cell: Cell, values: Values) -> Iterator[tuple[str, Computed]]:
    """The loss, and the rank's part of each weight's gradient: (name, :data:`Computed`)."""
    shards: dict[str, impls.Shard | None] = {}

    def set_weights(module: nn.Module) -> None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                shards[name] = shard = impls.shard_of(p)
                p.copy_(shard.of(values.weights[name]) if shard else values.weights[name])

    training, strategy, around = build_training(cell, mesh, set_weights)
    model = impls.model_preset(*cell.model_arguments)
    loss = training.gradients(rank_inputs(model, strategy, around, values.inputs)).double()
    for group in (strategy.place.group(*strategy.position_axes), around.dp_group):
        impls.all_reduce(loss, group)
    yield "loss", (loss, lambda x: x)
    scale = training.optimizer.scale.item() if impls.PRECISIONS[cell.precision].loss_scale else 1.0
    kept = training.backend.gradient_places()
    for name, part in training.backend.gradient_parts().items():

        def mine(x: Tensor, name: str = name) -> Tensor:
            x, shard = x.view(values.weights[name].shape), shards[name]
            return kept[name].of(shard.of(x) if shard else x)

        yield name, (part.values.double() / scale, mine)


def _called(mesh: DeviceMesh, cell: Cell, values: Values) -> Iterator[tuple[str, Computed]]:
    """The rank's part of each output and of each input's gradient: (name, :data:`Computed`)."""
    module, strategy, around = build_module(cell, mesh)
    model, dtype = impls.model_preset(*cell.model_arguments), impls.PRECISIONS[cell.precision].parameters
    batch = {name: x.to(dtype) for name, x in values.inputs.items()}
    inputs = {name: x.clone() for name, x in rank_inputs(model, strategy, around, batch).items()}
    outputs = module({name: x.requires_grad_() for name, x in inputs.items()})
    dims = {**model.sequence_dims, **model.parts()["model"].output_dims}

    def mine(x: Tensor, name: str) -> Tensor:
        return strategy.shard(x.chunk(around.replicas)[around.replica], dims[name])

    drawn_gradients = [
        mine(_drawn_gradient(name, values.reference.get(name, o)).to(values.inputs["q"].dtype).to(o), name)
        for name, o in outputs.items()
    ]
    torch.autograd.backward([*outputs.values()], drawn_gradients)
    for name, x in outputs.items():
        yield name, (x.detach(), partial(mine, name=name))
    for name, x in inputs.items():
        assert x.grad is not None, f"no output depends on the input {name}"
        yield f"d_{name}", (x.grad, partial(mine, name=name))


def _drawn_gradient(name: str, output: Tensor) -> Tensor:
    """A random gradient of an output, in its shape and in float64, with which the backward begins."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {name}".encode()))
    return torch.randn(output.shape, generator=generator, dtype=torch.float64)
