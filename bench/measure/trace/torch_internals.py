"""The private names of torch on which meters and engines rely, and a way to patch torch.

The rest of bench takes private names from this module, so that only this module changes if a release of torch
moves one. :func:`check_internals` names the one that has moved, before the first trace of a process.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend

from spbench.bench.errors import UserError
from spbench.impls import Unsupported

#: the first and last releases of torch with which the tests of meters passed; the nightly job runs both
TESTED = ("2.12", "2.15")


def _moved(what: str) -> UserError:
    first, last = TESTED
    return UserError(
        f"torch {torch.__version__}: {what} is not as spbench knows it; tested with torch {first} to {last}, "
        "install one of these"
    )


try:
    from torch._C._distributed_c10d import FakeProcessGroup as FakeProcessGroup
    from torch._ops import OpOverload as OpOverload
    from torch._prims_common import compute_required_storage_length as required_elements  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import disable_fake_tensor_cache as disable_fake_tensor_cache
    from torch.distributed.distributed_c10d import _resolve_process_group as group_named  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._mode_utils import no_dispatch as no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes  # noqa: F401
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils.flop_counter import flop_registry as flop_registry
except ImportError as error:
    raise _moved(str(error)) from error

#: torch's message for a tensor with more bytes than 64 bits can count, with the tensor's sizes
_OVERFLOW = re.compile(r"Storage size calculation overflowed with sizes=(\[[\d, ]+\])")

#: the attribute of a fake tensor that holds its device
FAKE_DEVICE = "_fake_device"
#: the device of fake tensors in the host's memory, which torch tells from the CPU, the device of all others
HOST = torch.device("cpu", 1)


@contextmanager
def foreach_of_fakes() -> Iterator[None]:
    """Within the context, optimizers and norms of fake tensors on the CPU take torch's foreach operators, as
    those of a GPU's tensors do; optimizers of tensors in the host's memory do not."""
    optimizer, utils = (
        import_module(f"torch.{name}") for name in ("optim.optimizer", "utils._foreach_utils")
    )
    kinds = {"_foreach_supported_types": [*optimizer._foreach_supported_types, FakeTensor]}

    def devices() -> list[str]:
        of_optimizer = sys._getframe(1).f_locals["params"]
        return [] if any(on_host(local(x)) for x in of_optimizer) else ["cpu"]

    on_cpu = {"_get_foreach_kernels_supported_devices": devices}
    with replaced(optimizer, kinds | on_cpu), replaced(utils, kinds):
        yield


@contextmanager
def around_shapes_of_dtensors(context: ContextDecorator) -> Iterator[None]:
    """Within the context, DTensor works out shapes, on tensors of the whole size that no rank has, in a
    ``context`` of its own."""
    propagator = import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    with replaced(propagator, {name: context(getattr(propagator, name))}):
        yield


def forget_shardings() -> None:
    """Empty DTensor's cache of shardings, which has meshes of earlier worlds, whose groups are gone."""
    import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


@contextmanager
def static_pipelines() -> Iterator[None]:
    """Within the context, the stages of a torch.distributed.pipelining schedule hold no vote on who knows the
    shapes of messages, because a fake rank cannot read the votes.

    Raises:
        UserError: a stage does not know its shapes.
    """
    if (schedules := sys.modules.get("torch.distributed.pipelining.schedules")) is None:
        yield
        return

    def vote(_: Any, stages: list[Any], has_backward: bool, *__: Any) -> None:
        for stage in stages:
            if schedules.InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                raise UserError(
                    "a PipelineStage asks the other stages for shapes, which do not run here: give it "
                    "input_args and output_args (of one micro-batch, for example on the meta device)"
                )
            stage._inference_mode = schedules.InferenceMode.STATIC

    with replaced(schedules._PipelineSchedule, {"_warmup_p2p": vote}):
        yield


@contextmanager
def around_backward(context: ContextDecorator) -> Iterator[None]:
    """Within the context, autograd's engine runs a backward in a ``context`` of its own."""
    run = context(torch.autograd.graph._engine_run_backward)
    with (
        replaced(torch.autograd, {"_engine_run_backward": run}),
        replaced(torch.autograd.graph, {"_engine_run_backward": run}),
    ):
        yield


def attention_order() -> list[SDPBackend]:
    """The kernels of attention in the order in which torch tries them, see torch.nn.attention.sdpa_kernel."""
    return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]


def below_autograd() -> Any:
    """A context in which operators make no autograd nodes, and reach modes whole."""
    return torch._C._AutoDispatchBelowAutograd()


def without_dispatch() -> Any:
    """A context in which operators reach no mode and no subclass of tensors."""
    return torch._C._DisableTorchDispatch()


def groups_of_process() -> dict[str, list[int]]:
    """The global ranks of each process group that this process belongs to, by the group's name."""
    every = dist.distributed_c10d._world.pg_group_ranks
    of_rank = (group for group in every if isinstance(group, dist.ProcessGroup))  # others stand as numbers
    return {group.group_name: sorted(every[group]) for group in of_rank}


def schema_of(func: OpOverload) -> Any:
    """The schema of an operator: its name, arguments and returns."""
    return func._schema


def storage_key(x: Tensor | torch.UntypedStorage) -> int:
    """A number that identifies a storage, or a tensor's storage, as long as the storage lives."""
    storage = x.untyped_storage() if isinstance(x, Tensor) else x
    return storage._cdata


def local(x: Tensor) -> Tensor:
    """The part of a tensor on this rank, for a DTensor; else the tensor."""
    while type(x) is not FakeTensor and is_traceable_wrapper_subclass(x):
        x = getattr(x, x.__tensor_flatten__()[0][0])
    return x


def on_host(x: Tensor) -> bool:
    """Whether a tensor is a fake one in the host's memory."""
    return bool(vars(x).get(FAKE_DEVICE) == HOST)


def pins() -> bool:
    """Whether operators make fake tensors, which can be in pinned memory; a build for CPUs pins no others."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_node() -> int | None:
    """The number of the autograd node that runs in this thread; None: no node runs. Nodes have different
    numbers, except that all accumulations of gradients have the same number."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_node() -> int:
    """The number that :func:`backward_node` will have for the next node that this thread's forward makes."""
    return torch._C._autograd._get_sequence_nr()


def fake_tensor(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    attributes: Mapping[str, Any],
    storage: torch.UntypedStorage | None = None,
    offset: int = 0,
) -> FakeTensor:
    """The tensor that ``FakeTensor.__new__`` makes, without its checks.

    Args:
        attributes: the tensor's attributes, without ``fake_mode``.
        storage: holds the tensor from element ``offset`` on; None: the tensor has a storage of its own.
    """
    with torch._C._DisableTorchDispatch():
        if storage is None:
            elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            elem = torch.empty(0, dtype=dtype, device="meta")
            elem.set_(storage, offset, shape, stride)
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(attributes)
    fake.fake_mode = mode
    return fake


def fake_like(x: FakeTensor, storage: torch.UntypedStorage | None) -> FakeTensor:
    """A tensor with the metadata of another, on ``storage`` (see :func:`fake_tensor`)."""
    attributes = {name: value for name, value in vars(x).items() if name != "fake_mode"}
    metadata = tuple(x.shape), x.stride(), x.dtype, x.fake_device, attributes
    return fake_tensor(x.fake_mode, *metadata, storage, int(x.storage_offset()))


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether more than one tensor lies on a storage. The caller's ``storage`` does not count."""
    return bool(torch._C._storage_Use_Count(storage_key(storage)) > 2)


def beyond_64_bits(what: str) -> Unsupported:
    """The error for a tensor or a sum with more bytes than 64 bits count; ``what`` begins the message."""
    return Unsupported(
        f"{what} more bytes than 64 bits count", "choose a smaller batch or sequence, or fused attention"
    )


@contextmanager
def too_large_unsupported() -> Iterator[None]:
    """Within the context, torch's error for a tensor whose bytes do not fit in 64 bits (which torch cannot
    make, not even as a fake tensor) becomes :class:`Unsupported`."""
    try:
        yield
    except RuntimeError as error:
        if (sizes := _OVERFLOW.search(str(error))) is None:
            raise
        raise beyond_64_bits(f"a tensor of shape {sizes[1]} has") from error


@contextmanager
def replaced(owner: Any, names: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, the attributes in ``names`` of a module or class of torch have the values there.

    Raises:
        UserError: the module or class lacks one of the attributes.
    """
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise _moved(f"{owner.__name__}.{missing[0]}")
    before = {name: getattr(owner, name) for name in names}
    try:
        for name, new in names.items():
            setattr(owner, name, new)
        yield
    finally:
        for name, old in before.items():
            setattr(owner, name, old)


@cache
def check_internals() -> None:
    """Check, in some milliseconds, that torch's private names behave as this module assumes.

    Raises:
        UserError: a private name has moved; the message has the name.
    """
    for name, holds in _EXPECTED.items():
        try:
            as_known = holds()
        except Exception:
            as_known = False
        if not as_known:
            raise _moved(name)


def _fakes_are_equal() -> bool:
    """Whether :func:`fake_tensor` makes a tensor and a view that equal torch's own."""
    mode = FakeTensorMode()
    with mode:
        tensor = torch.empty_strided((4, 6), (8, 1), dtype=torch.bfloat16)
        view = tensor[1:, ::2]
    assert isinstance(tensor, FakeTensor)
    assert isinstance(view, FakeTensor)
    for theirs, storage in ((tensor, None), (view, tensor.untyped_storage())):
        ours = fake_like(theirs, storage)
        if _metadata(ours) != _metadata(theirs) or vars(ours) != vars(theirs):
            return False
    return True


def _metadata(x: FakeTensor) -> tuple[Any, ...]:
    keys = str(torch._C._dispatch_keys(x))
    nbytes = x.untyped_storage().nbytes()
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.fake_device, nbytes, keys


def _storages_are_told_apart() -> bool:
    x, y = torch.empty(2), torch.empty(2)
    return storage_key(x) == storage_key(x[1:]) == storage_key(x.untyped_storage()) != storage_key(y)


def _tensors_on_storages_are_counted() -> bool:
    x = torch.empty(2)
    alone = not is_shared(x.untyped_storage())
    view = x[1:]
    return alone and is_shared(view.untyped_storage())


def _schemas_are_known() -> bool:
    schema, write = schema_of(torch.ops.aten.add_.Tensor), schema_of(torch.ops.aten.add_.Tensor).arguments[0]
    return schema.name == "aten::add_" and write.name == "self" and write.alias_info.is_write


def _backward_is_seen() -> bool:
    seen = [in_backward()]
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(in_backward()))
    with torch.enable_grad():
        (2 * x).backward()
    return seen == [False, True]


#: private name of torch -> a check that it behaves as this module assumes
_EXPECTED: dict[str, Callable[[], bool]] = {
    "FakeTensor.__new__": _fakes_are_equal,
    "torch.UntypedStorage._cdata": _storages_are_told_apart,
    "torch._C._storage_Use_Count": _tensors_on_storages_are_counted,
    "torch._ops.OpOverload._schema": _schemas_are_known,
    "torch._C._current_graph_task_id": _backward_is_seen,
}
