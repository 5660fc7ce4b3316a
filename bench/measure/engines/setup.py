"""Build and run a cell's step for any engine: its module, its training or inference, and a rank's inputs."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench import impls
from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.cell_schedule import attention_kernel, played_model, turns_of
from spbench.bench.measure.engines.plan import backend_options, composition
from spbench.bench.measure.trace.memory import MemoryMeter
from spbench.bench.measure.trace.recorder import Recorder


def set_up(
    cell: Cell,
    mesh: DeviceMesh,
    generator: torch.Generator | None = None,
    set_weights: Callable[[nn.Module], None] | None = None,
    turns: impls.Turns | None = None,
) -> tuple[impls.Training | impls.Inference, dict[str, Tensor]]:
    """(the training or inference of a cell on this rank, this rank's inputs by name), on the mesh's device.
    ``generator`` draws the inputs, ``set_weights`` sets the weights; ``turns``: see :func:`record_step`."""
    model = impls.model_preset(*cell.model_arguments)
    training: impls.Training | impls.Inference
    left_out: frozenset[str] = frozenset()
    if cell.training.step == "inference":
        module, strategy, around = build_module(cell, mesh, set_weights)
        training, left_out = impls.Inference(module, around), model.targets
    else:
        training, strategy, around = build_training(cell, mesh, set_weights, turns=turns)
    # drawn on the CPU, so that every device has the same, and moved before the rank's part is taken
    batch = {name: x.to(mesh.device_type) for name, x in model.inputs(*cell.shape, generator).items()}
    if not model.has_weights:
        batch = {name: x.to(impls.PRECISIONS[cell.precision].parameters) for name, x in batch.items()}
    inputs = rank_inputs(model, strategy, around, batch)
    inputs = {name: part for name, part in inputs.items() if name not in left_out}
    if cell.training.batch_on_device == "part":
        inputs = {name: part.clone() for name, part in inputs.items()}
    return training, inputs


def build_training(
    cell: Cell,
    mesh: DeviceMesh,
    set_weights: Callable[[nn.Module], None] | None = None,
    cls: type[impls.Strategy] | None = None,
    turns: impls.Turns | None = None,
) -> tuple[impls.Training, impls.Strategy, impls.Composition]:
    """The training of a cell on this rank, with its strategy and its composition.

    Args:
        set_weights: sets the module's weights before they are copied or sharded (after that, if the backend
            starts on the meta device). None: weights have no values.
        cls: the strategy's class, in place of the registered class with the name in the cell.
        turns: see :func:`record_step`.
    """
    deferred = impls.backend_class(cell.training.backend).starts_on_meta(backend_options(cell))
    before, device = (None, "meta") if deferred else (set_weights, None)
    module, strategy, around = build_module(cell, mesh, before, cls, device)
    attributes = impls.attributes_of(module)
    training = impls.Training(
        module,
        strategy,
        impls.PRECISIONS[cell.precision],
        moments=cell.training.moments,
        backend=cell.training.backend,
        backend_options=cell.training.backend_options,
        around=around,
        micro_batches=cell.training.micro_batches,
        schedule=cell.training.schedule,
        turns=turns or turns_of(cell, around.stage),
    )
    if deferred and set_weights is not None:
        parts, again = training.backend.weight_parts(), partial(_built, cell, strategy, around, "cpu")
        set_weights(impls.WholeParameters(module, parts, attributes, again))
    return training, strategy, around


def build_module(
    cell: Cell,
    mesh: DeviceMesh,
    set_weights: Callable[[nn.Module], None] | None = None,
    cls: type[impls.Strategy] | None = None,
    device: str | None = None,
) -> tuple[nn.Module, impls.Strategy, impls.Composition]:
    """A cell's module on this rank, with its strategy and its composition; arguments as of
    :func:`build_training`. ``device``: the type of the module's device; None: the mesh's."""
    place = impls.Place.on(mesh, cell.mesh_sizes)
    strategy = (cls or impls.nesting(cell.strategy)).configured(place, cell.strategy_options)
    around = composition(cell, place)
    module = _built(cell, strategy, around, device or mesh.device_type)
    if set_weights is not None:
        set_weights(module)
    return module, strategy, around


def _built(cell: Cell, strategy: impls.Strategy, around: impls.Composition, device: str) -> nn.Module:
    model = played_model(cell)
    with impls.default_dtype(impls.PRECISIONS[cell.precision].parameters), torch.device(device):
        return impls.rank_module(partial(model.build, strategy, cell.shape[1]), around)


def rank_inputs(
    model: impls.Model, strategy: impls.Strategy, around: impls.Composition, batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """This rank's part of each tensor of a whole batch, by name, as views."""
    return {
        name: strategy.shard(
            value if name in model.unbatched else value.chunk(around.replicas)[around.replica],
            model.sequence_dims[name],
        )
        for name, value in batch.items()
    }


def record_step(
    cell: Cell,
    mesh: DeviceMesh,
    recorder: Recorder,
    generator: torch.Generator | None = None,
    set_weights: Callable[[nn.Module], None] | None = None,
    turns: impls.Turns | None = None,
) -> tuple[impls.Training | impls.Inference, dict[str, Tensor]]:
    """Set up and run ``training.steps`` steps under an entered recorder; returns the training or inference,
    and its inputs by name, for further steps.

    Args:
        set_weights: sets the weights, unseen by the recorder; None: weights have no values (fake tensors).
        turns: the pipeline's turns, if the step runs other micro-batches than the cell's; None: the cell's.
    """

    def set_unseen(module: nn.Module) -> None:
        if set_weights is not None:
            with recorder.paused():
                set_weights(module)

    recorder.memory.attention = attention_kernel(cell)
    training, inputs = set_up(cell, mesh, generator, set_unseen, turns)
    recorder.communication.axes.update(training.around.place.flattened)
    _tag(recorder.memory, training, inputs)
    for number in range(1, cell.training.steps + 1):
        with recorder.step(last=number == cell.training.steps):
            training.step(inputs, recorder.phase)
    _tag(recorder.memory, training, inputs)  # tensors that the steps made and still hold, such as moments
    return training, inputs


def _tag(
    memory: MemoryMeter, training: impls.Training | impls.Inference, inputs: Mapping[str, Tensor]
) -> None:
    """Tag the tensors that training holds. No list of them outlives the call, as it would keep them alive."""
    for category, tensors in training.held().items():
        memory.tag(tensors, category, keep=True)  # weights that are also the master weights stay parameters
    memory.tag(inputs.values(), "inputs")


def workspace_bytes(cell: Cell) -> dict[str, int]:
    """The bytes of each library's workspace on the cell's cluster, by the names of :attr:`Device.workspaces`;
    for cuBLAS, the bytes that ``training.cublas_workspace`` sets, if the cell sets it."""
    limits = load_cluster(cell.cluster).device.workspaces
    nbytes: dict[str, int] = {name: limit.value or 0 for name, limit in limits.items()}
    engine = nbytes.get("transformer_engine", 0)
    nbytes[impls.GROUPED_WORKSPACES] = impls.GROUPED_STREAMS * engine
    if cell.strategy_options.get("userbuffers"):
        nbytes["transformer_engine"] = (1 + impls.USERBUFFER_STREAMS) * engine
    if (config := cell.training.cublas_workspace) is not None:
        # pairs of KiB and count, such as ":4096:2:16:8", whose products torch adds
        numbers = [int(number) for number in config.split(":")[1:]]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        nbytes["cublas"] = sum(kib * 2**10 * count for kib, count in pairs)
    return nbytes
