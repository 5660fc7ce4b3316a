"""What an operator returns on fake tensors, by the metadata of its arguments: described, and for most of them
worked out without FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spbench.bench.measure.trace.memory import makes_on_host
from spbench.bench.measure.trace.meter import communicates
from spbench.bench.measure.trace.torch_internals import (
    FAKE_DEVICE,
    FakeTensor,
    schema_of,
    storage_key,
    without_dispatch,
)

Path = tuple[int | str, ...]
Key = tuple[Any, ...]

#: operators that change metadata or storage of an argument, or whose result depends on values
_UNUSUAL_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.maybe_aliasing_or_mutating,
)
_UNUSUAL = frozenset(
    {"aten::resize_", "aten::set_", "aten::lift_fresh", "aten::lift", "aten::_local_scalar_dense"}
)
#: operators of torch whose results lie where their arguments do, in a layout that no device chooses, beside
#: views and what goes element by element
_OF_METADATA_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "bmm", "addmm", "baddbmm_", "cat", "stack", "clone", "_to_copy", "_unsafe_view", "copy_"),
        *("empty_like", "zeros_like", "new_empty", "new_zeros", "fill_", "zero_", "normal_"),
        *("sum", "mean", "amax", "gather", "scatter_add_", "select_backward", "slice_backward"),
        *("embedding", "embedding_dense_backward", "nll_loss_forward", "nll_loss_backward"),
        *("_log_softmax", "_log_softmax_backward_data", "_fused_adamw_"),
    )
)
_PLAIN_SCALARS = (
    *(bool, int, float, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class Made:
    """The metadata of a result that the operator makes. ``view_of``: the argument in whose storage it lies
    from ``offset`` on; None: it has a storage of its own, contents unknown."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]
    view_of: Path | None = None
    offset: int = 0


@dataclass(frozen=True)
class OperatorArgument:
    """A result that is an argument itself (operators in place, and ``out=``)."""

    path: Path


@dataclass(frozen=True, eq=False)
class Remembered:
    """What an operator returned; one object for each key.

    Attributes:
        results: in order; None: it returned None.
        container: type of the returned tuple or list; None for a single tensor.
    """

    results: tuple[Made | OperatorArgument, ...] | None
    container: type | None


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Key | None:
    """The key of a call: all that its results depend on. None if that may be more than the metadata of plain
    fake tensors and the values of plain scalars."""
    key: list[Any] = [func, torch.get_default_dtype()]
    for value in args:
        if not _describe(value, key):
            return None
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            if not _describe(value, key):
                return None
    return tuple(key)


def _describe(value: Any, key: list[Any]) -> bool:
    """Append to ``key`` all of an argument that a call depends on; returns whether that is all known."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.dtype.is_complex:
            return False
        # read at every call: an assignment to x.data changes a tensor under its identity
        key += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
        return True
    if kind in _PLAIN_SCALARS:
        key += (kind, value)
        return True
    if kind is list or kind is tuple or kind is torch.Size:
        key += (list, len(value))
        return all(_describe(item, key) for item in value)
    return False


def described(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Remembered | None:
    """What to build as results of the next call with this key; None: that call must take the plain path."""
    if communicates(func) or schema_of(func).name in _UNUSUAL:
        return None
    if any(t in func.tags for t in _UNUSUAL_TAGS) and not _by_places(func, args):
        return None
    results = result if type(result) in (tuple, list) else [] if result is None else [result]
    if any(type(x) is not FakeTensor or x.constant is not None for x in results):
        return None
    return _remembered(args, kwargs, result)


def _by_places(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call takes elements by listed places; with a mask, the mask's values would say how many."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(x is None or x.dtype in (torch.int32, torch.int64) for x in args[1])


def _remembered(
    args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, attributes: Mapping[str, Any] | None = None
) -> Remembered | None:
    """What to build again as the results of a call; None where that cannot be said.

    Args:
        attributes: of fake tensors in place of the results, with their device; None: the results' own.
    """
    if result is None:
        return Remembered(None, None)
    several = type(result) in (tuple, list)
    arguments = dict(_tensors((), args, kwargs))
    # an argument on each storage; None: the storage is that of an earlier result
    storages: dict[int, Path | None] = {storage_key(x): path for path, x in arguments.items()}
    results: list[Made | OperatorArgument] = []
    for x in result if several else [result]:
        if not isinstance(x, Tensor):
            return None
        same = next((path for path, argument in arguments.items() if argument is x), None)
        if same is not None:
            results.append(OperatorArgument(same))
            continue
        path, offset = storages.get(storage_key(x)), int(x.storage_offset())
        if path is None:
            if offset or x.untyped_storage().nbytes() != _dense_bytes(x) or storage_key(x) in storages:
                return None
            storages[storage_key(x)] = None
        its = attributes or {name: value for name, value in vars(x).items() if name != "fake_mode"}
        description = tuple(x.shape), x.stride(), x.dtype, its[FAKE_DEVICE], its, path, offset
        results.append(Made(*description))
    return Remembered(tuple(results), type(result) if several else None)


def worked_out(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Remembered | None:
    """The results of an operator, by running it on tensors of the meta device, which takes a tenth of the
    time of FakeTensorMode; None: the mode has to be asked.

    Args:
        args, kwargs: for which there is a key.
        attributes: of tensors as the mode makes them.
    """
    if not _is_of_metadata_alone(func) or makes_on_host(func):
        return None
    devices = {x.fake_device for _, x in _tensors((), args, kwargs)}  # type: ignore[attr-defined]
    if len(devices) != 1 or any(type(value) is torch.device for value in (*args, *kwargs.values())):
        return None
    try:
        with without_dispatch():
            args, kwargs = _on_meta(args), {name: _on_meta(value) for name, value in kwargs.items()}
            result = func(*args, **kwargs)
    except NotImplementedError:  # the mode may take it apart into others
        return None
    (device,) = devices
    return _remembered(args, kwargs, result, {**attributes, FAKE_DEVICE: device})


def _is_of_metadata_alone(func: Any) -> bool:
    """Whether the mode does nothing about an operator but run it on the meta device: ours, views, and the
    operators of torch that a step calls most. Others may put their results elsewhere, as constructors do, or
    choose their layout by the device, as convolutions do."""
    schema = schema_of(func)
    if func.namespace == "spbench":
        return not any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    if schema.name in _UNUSUAL or any(tag in func.tags for tag in _UNUSUAL_TAGS):
        return False
    by_element_or_view = func.is_view or torch.Tag.pointwise in func.tags
    return schema.name in _OF_METADATA_ALONE or (func.namespace == "aten" and by_element_or_view)


def _on_meta(value: Any) -> Any:
    """An argument with each fake tensor replaced by one of the meta device in the same storage."""
    if isinstance(value, Tensor):
        x = torch.empty(0, dtype=value.dtype, device="meta")
        return x.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return type(value)(map(_on_meta, value)) if type(value) in (tuple, list) else value


def _dense_bytes(x: Tensor) -> int:
    """Bytes of the storage that ``empty_strided`` makes for the shape and strides of x."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _tensors(path: Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    """The tensors among the arguments, with the path to each: positions in lists, names of keywords."""
    items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for step, value in items:
        if isinstance(value, Tensor):
            yield (*path, step), value
        elif isinstance(value, (list, tuple)):
            yield from _tensors((*path, step), value, {})


def argument_at(path: Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument at a path of :func:`_tensors`."""
    first, *rest = path
    argument = kwargs[first] if isinstance(first, str) else args[first]
    for step in rest:
        argument = argument[step]
    return argument
