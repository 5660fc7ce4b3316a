"""The world in which a user's step runs as one of many ranks: a fake process group, meshes, and devices.

Fake tensors are on the CPU, because a build of torch without CUDA cannot make others. So a step that asks
for its device, or that writes "cuda" out, gets the CPU's fake tensors.

Attention, RMSNorm and dropout run as on a GPU, by the fused operators of CUDA. For the CPU's tensors torch
calls other operators. No list of what a selective checkpoint keeps names the CPU's attention, torch's context
parallelism does not turn it into a ring, and RMSNorm and dropout keep more tensors for backward.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.backends import cuda
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from spbench.bench.measure.processes.starting import environment_with
from spbench.bench.measure.steps.step_file import STANDING_IN
from spbench.bench.measure.trace import torch_internals
from spbench.bench.measure.trace.torch_internals import FAKE_DEVICE, attention_order, below_autograd, pins
from spbench.bench.setting_values import COMPILED
from spbench.bench.yaml_files import read_yaml

#: what a world plays, in tables that the file explains
_TABLES = read_yaml(Path(__file__).with_name("played.yaml"))
_PLAYED, _OF_RANKS, _SCALED_BY_COUNTS = (
    _TABLES[kind] for kind in ("devices", "of_ranks", "scaled_by_counts")
)


class OnCpu(TorchFunctionMode, ContextDecorator):
    """While entered, calls of torch's functions that name a GPU mean the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1)
        if func is torch.Tensor.to and caller.f_code.co_name == "foreach_reduce":
            return args[0].cpu(**kwargs)  # type: ignore[arg-type]  # FSDP's name for the host and the GPU
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        if func in (torch.Tensor.item, torch.equal) and package in _SCALED_BY_COUNTS:
            torch.cpu.synchronize()  # the host waits for the value
            return 1
        if func is torch.Tensor.data_ptr and isinstance(args[0], torch_internals.FakeTensor):
            return args[0].untyped_storage()._cdata  # by which programs tell tensors apart
        place = hosted if func in (Tensor.to, torch.empty_like) else played
        named = {name: place(value) for name, value in (kwargs or {}).items()}
        if func == _SET_DATA and pins():
            vars(args[0])[FAKE_DEVICE] = vars(args[1])[FAKE_DEVICE]
        if not pins():
            if func is torch.Tensor.pin_memory:
                return args[0]
            named.pop("pin_memory", None)
        return func(*map(place, args), **named)


def hosted(value: Any) -> Any:
    """The host's memory in place of the word "cpu", where libraries have a device; else as :func:`played`."""
    return torch_internals.HOST if type(value) is str and value == "cpu" and pins() else played(value)


def played(value: Any) -> Any:
    """The CPU in place of a GPU; any other value as it is."""
    kind = type(value)
    if kind is torch.device and value.type in _PLAYED and value != torch_internals.HOST:
        return torch.device("cpu")
    if kind is str and value.partition(":")[0] in _PLAYED:
        return "cpu"
    return value


_SAVE, _SET_DATA = save_on_cpu.__init__, Tensor.data.__set__  # type: ignore[attr-defined]


def _to_host(x: Tensor, *_: Any, non_blocking: bool = False, **__: Any) -> Tensor:
    return x.to(torch_internals.HOST, non_blocking=non_blocking) if pins() else x


def _drawn(tensor: torch.Tensor, mean: float, std: float, *_: Any, **further: Any) -> torch.Tensor:
    """A tensor of normal numbers: those of a truncated normal distribution are drawn until all are within
    the bounds, which fake tensors cannot tell."""
    with torch.no_grad():
        return tensor.normal_(mean, std, **further)


def _on_cpu(call: Callable[..., Any], *, unwatched: bool = False) -> Callable[..., Any]:
    """The same function, for which a GPU that is named means the CPU; ``unwatched``: run outside of all
    modes, with real tensors, as meshes need."""

    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        if isinstance(numbers := kwargs.get("_rank_map"), torch.Tensor):
            # init_device_mesh has made them in the mode: the numbers of all ranks
            with torch_internals.without_modes():
                kwargs["_rank_map"] = torch.arange(numbers.numel(), dtype=torch.int)
        with torch_internals.without_modes() if unwatched else nullcontext():
            named = {name: played(value) for name, value in kwargs.items()}
            return call(*map(played, args), **named)

    return called


def _mesh_methods(made: list[DeviceMesh]) -> dict[str, Any]:
    """The functions of :class:`DeviceMesh` in :data:`_OF_RANKS`, unwatched; each new mesh is added to
    ``made``."""
    methods: dict[str, Any] = {}
    for name in _OF_RANKS:
        own = vars(DeviceMesh)[name]
        call = getattr(own, "fget", None) or getattr(own, "__func__", own)
        real = _on_cpu(call, unwatched=True)
        methods[name] = real if call is own else type(own)(real)
    init = methods["__init__"]

    def noted(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        init(mesh, *args, **kwargs)
        made.append(mesh)

    return {**methods, "__init__": noted}


@contextmanager
def rank_of_world(rank: int, world: int, of_node: int, *, on_cpu: bool = True) -> Iterator[list[DeviceMesh]]:
    """Within the context, the user's code runs as ``rank`` of ``world`` ranks, of which ``of_node`` share a
    node: the environment has RANK and its like, torch's default group, which exists, stays as it is, and with
    ``on_cpu`` a GPU means the CPU. Yields the user's meshes, as they are made.
    """
    local, meshes = rank % of_node, list[DeviceMesh]()
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "MASTER_PORT": 29500}
    environment |= {"LOCAL_WORLD_SIZE": min(of_node, world)}
    torch_internals.forget_shardings()
    with ExitStack() as stack:
        stack.enter_context(environment_with({name: str(n) for name, n in environment.items()}))
        stack.enter_context(environment_with({"MASTER_ADDR": "localhost"}))
        for owner in (dist, dist.distributed_c10d):
            nothing = dict.fromkeys(("init_process_group", "destroy_process_group"), lambda *_, **__: None)
            stack.enter_context(torch_internals.replaced(owner, nothing))
        stack.enter_context(torch_internals.replaced(DeviceMesh, _mesh_methods(meshes)))
        for owner, names in _devices(local, of_node).items() if on_cpu else ():
            stack.enter_context(torch_internals.replaced(owner, names))
        if on_cpu:
            stack.enter_context(torch_internals.around_backward(OnCpu()))  # torch leaves it in backward
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # for what was compiled before
            stack.enter_context(OnCpu())
        yield meshes


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """torch.compile without effect: the model or function itself, or a decorator that returns it."""
    code = sys._getframe(1).f_code
    # packages decorate functions as they are imported, whether or not a step calls them
    if code.co_flags & inspect.CO_OPTIMIZED or "-packages" not in code.co_filename:
        warnings.warn("torch.compile has no effect in a trace: the step runs eagerly", stacklevel=2)
        STANDING_IN.add(COMPILED)
    return (lambda function: function) if model is None else model


def _of_cpu(name: str, *args: Any, **kwargs: Any) -> Any:
    """A call of a function of torch.cpu, as the recorder has replaced it."""
    return getattr(torch.cpu, name)(*args, **kwargs)


def _devices(local: int, of_node: int) -> dict[Any, dict[str, Any]]:
    """By module or class of torch, the functions that choose or follow a device, as the CPU answers them."""
    values = {"local": local, "of_node": of_node, "cpu": torch.device("cpu")}

    def answering(value: Any) -> Callable[..., Any]:  # one each, because torch.compile tells functions apart
        value = values.get(value, value)
        return lambda *_, **__: torch.get_rng_state() if value == "rng" else value

    answers = {
        module: {name: answering(value) for value, names in of_module.items() for name in names}
        for module, of_module in ((torch.cuda, _TABLES["cuda"]), (torch.accelerator, _TABLES["accelerator"]))
    }
    answers[torch.cuda] |= {name: partial(_of_cpu, name) for name in _TABLES["of_cpu"]}
    for name in _TABLES["classes_of_cpu"]:  # classes, because annotations name them
        made = {"__new__": lambda _, *args, name=name, **kwargs: _of_cpu(name, *args, **kwargs)}
        answers[torch.cuda][name] = type(name, (), made)
    return {
        torch: {"compile": _uncompiled},
        **answers,
        torch.autocast: {"__init__": _on_cpu(torch.autocast.__init__)},
        torch.nn.init: {"_no_grad_trunc_normal_": _drawn},
        Tensor: {"cpu": _to_host, "cuda": lambda x, *_, **further: x.to(torch.device("cpu"), **further)},
        save_on_cpu: {"__init__": lambda hooks, pin_memory=False, **_: _SAVE(hooks, pin_memory and pins())},
    }


def axes_of(meshes: Sequence[DeviceMesh]) -> dict[str, str]:
    """The axis of each process group of this rank, by the group's name: a dimension of one of the user's
    ``meshes``, "world" for all ranks, or what the group is like, as "4 ranks, 2 apart"."""
    axes = {}
    for name, ranks in torch_internals.groups_of_process().items():
        distance = {b - a for a, b in pairwise(ranks)}
        like = f"{len(ranks)} ranks" + (f", {distance.pop()} apart" if len(distance) == 1 else "")
        axes[name] = "world" if len(ranks) == dist.get_world_size() else like
    for mesh in meshes:
        for dim in mesh.mesh_dim_names or ():
            with torch_internals.without_modes():
                group = mesh.get_group(dim) if mesh.get_coordinate() is not None else None
            if group is not None:
                axes[group.group_name] = dim
    return axes


_ATEN = torch.ops.aten
_FUSED = {
    SDPBackend.CUDNN_ATTENTION: _ATEN._scaled_dot_product_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: _ATEN._scaled_dot_product_efficient_attention,
}
#: the largest head size of flash attention and cuDNN
_MOST_FEATURES = 256


def kernel_of(q: Tensor, k: Tensor, v: Tensor, masked: bool, shared: bool) -> SDPBackend:
    """The kernel that torch takes on an NVIDIA GPU, the first in its order that is enabled and takes such
    tensors (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    Args:
        q, k, v: [B, Z, L, A]; k and v may have fewer heads if they are ``shared``.
    """
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= _MOST_FEATURES
    usable = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled()
        and half
        and not masked
        and q.shape[-1] == v.shape[-1],
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled() and half,
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled() and not shared,
        SDPBackend.MATH: True,
    }
    return next(each for each in attention_order() if usable.get(each))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output of scaled_dot_product_attention, whose arguments these are."""
    whole = q.dim() == k.dim() == v.dim() == 4
    shared = whole and enable_gqa and k.shape[1] != q.shape[1]
    kernel = kernel_of(q, k, v, mask is not None, shared) if whole else SDPBackend.MATH
    output: Tensor
    if kernel == SDPBackend.FLASH_ATTENTION:
        output, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)
    elif kernel in _FUSED:
        if mask is not None:
            if mask.dtype == torch.bool:  # the kernels add the mask to the scores
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)
            mask = mask.expand(*q.shape[:3], k.shape[2])
        kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        output, *_ = _FUSED[kernel](q, k, v, mask, kept, dropout, causal, scale=scale)
    else:
        further = {"scale": scale, "enable_gqa": enable_gqa}
        output, *_ = _ATEN._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, **further)
    return output


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
        with below_autograd():
            y, rstd = _ATEN._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        d_x, d_weight = _ATEN._fused_rms_norm_backward(*gradients, x, ctx.shape, rstd, weight, wanted)
        return d_x, None, d_weight, None


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The output of rms_norm, whose arguments these are; torch fuses it only in one precision."""
    if weight is not None and weight.dtype != x.dtype:
        return _ATEN._fused_rms_norm(x, shape, weight, eps)[0]
    return _RmsNorm.apply(x, shape, weight, eps)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _ATEN.native_dropout(x, p, True)[0] if train and p > 0 else x


@contextmanager
def operators_of_gpus() -> Iterator[None]:
    """Within the context, functions of the CPU's tensors call CUDA's operators, which only fake tensors can
    take. torch's dispatcher calls them, because a mode of torch's functions does not see what runs within
    other functions of torch, for example a recomputation in backward."""
    functions = {"scaled_dot_product_attention": _attention, "rms_norm": _rms_norm, "dropout": _dropout}
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            for key in ("AutogradCPU", "CPU"):
                library.impl(name, function, key)
        yield
    finally:
        library._destroy()
