"""Descriptions of the results of operators on fake tensors, by the metadata of their arguments; for most
operators without FakeTensorMode.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spbench.bench.measure.trace.memory import makes_on_host
from spbench.bench.measure.trace.meter import Made, OperatorArgument, Path, Remembered, communicates
from spbench.bench.measure.trace.operator_prices import OPERATORS
from spbench.bench.measure.trace.torch_internals import (
    FAKE_DEVICE,
    FakeTensor,
    required_elements,
    schema_of,
    storage_key,
    without_dispatch,
)

Key = tuple[Any, ...]

#: tags of operators like those of the table ``unusual``
_UNUSUAL_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.maybe_aliasing_or_mutating,
)
_UNUSUAL, _OF_METADATA_ALONE = (
    frozenset(f"aten::{name}" for name in OPERATORS[kind]) for kind in ("unusual", "of_metadata_alone")
)
_PLAIN_SCALARS = (
    *(bool, int, float, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Key | None:
    """The key of a call: all facts on which its results depend. None if the results may depend on more than
    the metadata of plain fake tensors and the values of plain scalars."""
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
    """Append to ``key`` all facts of an argument on which a call depends; False: some are unknown."""
    kind = type(value)
    if kind is FakeTensor:
        if (own := value.__dict__)["constant"] is not None or value.dtype.is_complex:
            return False
        # read at every call: an assignment to x.data changes a tensor under its identity
        key += (value.dtype, value.shape, value.stride(), value.storage_offset(), own[FAKE_DEVICE])
        return True
    if kind in _PLAIN_SCALARS:
        key += (kind, value)
        return True
    if kind is list or kind is tuple or kind is torch.Size:
        key += (list, len(value))
        return all(_describe(item, key) for item in value)
    return False


def described(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Remembered | None:
    """The description from which the next call with the same key builds its results; None: that call must
    take the plain path of :class:`Recorder`."""
    if communicates(func) or schema_of(func).name in _UNUSUAL:
        return None
    by_places = func is torch.ops.aten.index.Tensor and all(
        x is None or x.dtype in (torch.int32, torch.int64) for x in args[1]
    )
    if any(t in func.tags for t in _UNUSUAL_TAGS) and not by_places:  # a mask's values would matter
        return None
    results = result if type(result) in (tuple, list) else [] if result is None else [result]
    if any(type(x) is not FakeTensor or x.constant is not None for x in results):
        return None
    return _remembered(args, kwargs, result)


def _remembered(
    args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, attributes: Mapping[str, Any] | None = None
) -> Remembered | None:
    """The description of a call's results; None if the results cannot be described.

    Args:
        attributes: attributes of the fake tensors, with their device; None: those of the results.
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
            dense = required_elements(x.shape, x.stride(), 0) * x.element_size()
            if offset or x.untyped_storage().nbytes() != dense or storage_key(x) in storages:
                return None
            storages[storage_key(x)] = None
        its = attributes or {name: value for name, value in vars(x).items() if name != "fake_mode"}
        description = tuple(x.shape), x.stride(), x.dtype, its[FAKE_DEVICE], its, path, offset
        results.append(Made(*description))
    return Remembered(tuple(results), type(result) if several else None)


def worked_out(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Remembered | None:
    """The description of an operator's results, by running the operator on the meta device, which takes a
    tenth of the time of FakeTensorMode; None: only the mode can run the operator.

    Args:
        args, kwargs: arguments for which :func:`key_of` has a key.
        attributes: attributes of the fake tensors that the mode makes.
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
    """Whether FakeTensorMode only runs an operator on the meta device. This holds for spbench's operators,
    views, and the operators of torch that a step calls most. Other operators may put their results on another
    device, as constructors do, or choose their layout by the device, as convolutions do."""
    schema = schema_of(func)
    if func.namespace == "spbench":
        return not any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    if schema.name in _UNUSUAL or any(tag in func.tags for tag in _UNUSUAL_TAGS):
        return False
    by_element_or_view = func.is_view or torch.Tag.pointwise in func.tags
    return schema.name in _OF_METADATA_ALONE or (func.namespace == "aten" and by_element_or_view)


def _on_meta(value: Any) -> Any:
    """An argument in which each fake tensor is replaced by a meta tensor on the same storage."""
    if isinstance(value, Tensor):
        x = torch.empty(0, dtype=value.dtype, device="meta")
        return x.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return type(value)(map(_on_meta, value)) if type(value) in (tuple, list) else value


def _tensors(path: Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    """(path, tensor) for each tensor among the arguments; a path has positions and names of keywords."""
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
