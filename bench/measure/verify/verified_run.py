"""A case of verification, and its run on one rank or on one device: forward, backward and gradient sync; if
asked for, with the tensors that go into the model's attention and come out of it.

Outputs and gradients of weights say that a strategy is wrong; the tensors of attention say where its step
goes wrong first. Attention is watched only to explain a verdict, in a further run.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spbench import impls
from spbench.bench.measure.trace.recorder import Recorder

#: the standard deviation of weights: with the 0.02 of training every softmax of a tiny model would be almost
#: flat, and the gradients of queries and keys tiny
DEVIATION = 0.2
#: methods that strategies override: from queries, keys and values to heads, all [B, Z, L or a part, A]
SITES = ("attention", "causal_attention", "linear_attention")
#: the sequence dim of the arguments and results of these methods
SITE_DIM = 2


@dataclass(frozen=True)
class Case:
    """One comparison of a strategy with the single device.

    Attributes:
        strategy, options: the class or nested classes (not names, which need a registry), and options.
        model: the model with its options set.
        part: a key of ``model.parts()``.
        dtype: a key of PRECISIONS, for weights, activations and gradients of the checked run.
        batch, seq_len: whole sizes, in samples and positions.
        seed: the seed of weights, inputs and the gradient of the outputs.
        backend, backend_options: the backend, which holds and synchronises gradients; see :class:`Training`.
        folds: ranks along folded axes (:mod:`spbench.impls.folding`), in addition to the mesh's axes.
    """

    strategy: type[impls.Strategy] | impls.Nesting
    model: impls.Model
    part: str
    dtype: str = "fp64"
    batch: int = 3
    seq_len: int = 24
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    backend: str = impls.DEFAULT_BACKEND
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    folds: Mapping[str, int] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return impls.PRECISIONS[self.dtype].parameters


class VerifiedRun:
    """Forward, backward and gradient sync of the case's part with a strategy, on this rank's shards.

    Args:
        dtype: the dtype of the arithmetic. In every run weights and inputs have values that the case's dtype
            can hold, so that only the arithmetic differs.
        shapes: the shapes of the whole outputs; None where this run's outputs are whole.
        around: the composition of the mesh's axes, for the backend's groups.
        device: the device of all tensors; values are drawn on the CPU, the same for every device.
        recorder: records the communication.
        watch: whether the tensors of attention are kept, in ``sites``.
        given: the ``choices`` of a run on one device, which routers must make; empty: routers choose.

    Attributes:
        choices: the experts of all tokens, [B, L, k], by router, on one device whose routers choose.
    """

    def __init__(
        self,
        case: Case,
        strategy: impls.Strategy,
        dtype: torch.dtype,
        shapes: Mapping[str, torch.Size] | None = None,
        around: impls.Composition | None = None,
        *,
        device: str,
        recorder: Recorder | None = None,
        watch: bool = False,
        given: Mapping[str, np.ndarray] = MappingProxyType({}),
    ):
        self.strategy, self.part, self.device = strategy, case.model.parts()[case.part], device
        cls = impls.backend_class(case.backend)
        options = impls.options_of_backend(case.backend, case.backend_options)
        on_meta, build = cls.starts_on_meta(options), partial(_build, case, self.part.build, strategy, dtype)
        self.module = build("meta" if on_meta else device)
        if not on_meta:
            _set_weights(case, self.module, self.module.parameters())
        # noted before a backend replaces the parameters
        self.shards = {name: impls.shard_of(p) for name, p in self.module.named_parameters()}
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self.experts = {name for name, p in self.module.named_parameters() if impls.is_expert(p)}
        attributes = impls.attributes_of(self.module)
        settings = impls.BackendSettings(moments="later", options=options)
        composed, precision = around or impls.Composition(), impls.Precision(dtype)
        self.backend = cls(self.module, strategy, composed, precision, settings)
        if on_meta:
            parts = self.backend.weight_parts()
            weights = impls.WholeParameters(self.module, parts, attributes, partial(build, "cpu"))
            _set_weights(case, weights, [part.values for part in parts.values()])
        self.backend.zero()
        self.choices: dict[str, np.ndarray] = {}
        self._watch_routers(case.batch, given)
        whole = self.part.inputs(case.batch, case.seq_len, torch.Generator().manual_seed(case.seed))
        self.inputs = {name: self._input(name, x, case.torch_dtype, dtype) for name, x in whole.items()}

        if recorder is not None:
            recorder.communication.axes.update(strategy.place.flattened)
        phase = nullcontext if recorder is None else recorder.phase
        with recorder or nullcontext():
            watching = watched(strategy, self.module) if watch else nullcontext(Sites())
            with phase("forward"), watching as self.sites:
                self.outputs: dict[str, Tensor] = self.module(self.inputs)
            loss = self.outputs.get("loss")
            if loss is None:
                weighed = [
                    (x * self._output_gradient(name, shapes[name] if shapes else x.shape, case).to(x)).sum()
                    for name, x in self.outputs.items()
                ]
                loss = torch.stack(weighed).sum()
            with phase("backward"):
                self.backend.begin_last_backward(self.module)
                loss.backward()
            with phase("gradient_sync"):
                self.backend.synchronize()
        # detached, because the garbage collector cannot free a graph whose hooks and saved tensors lead back
        # here: the graph would keep process groups and their threads alive
        self.outputs = {name: x.detach() for name, x in self.outputs.items()}

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors to compare, by name: this rank's part, or the group's sum of tensors that all ranks
        have a share of; of a gradient, the part that the backend keeps."""
        tensors: dict[str, Tensor | None] = {}
        for name, x in self.outputs.items():
            shared = self.part.output_dims[name] is None
            tensors[f"output {name}"] = self._summed(x) if shared else x
        for name, x in self.inputs.items():
            if x.requires_grad:
                # if every rank holds the whole input, each rank has the gradient of its share of the loss
                shared = self.part.sequence_dims[name] is None
                tensors[f"gradient of input {name}"] = self._summed(x.grad) if shared else x.grad
        gradients = self.backend.gradient_parts()
        for name in self.backend.gradient_places():
            tensors[f"gradient of {name}"] = gradients[name].values if name in gradients else None
        return tensors

    def _input(self, name: str, full: Tensor, values: torch.dtype, dtype: torch.dtype) -> Tensor:
        if full.is_floating_point():
            full = full.to(values).to(dtype)
        x = self.strategy.shard(full.to(self.device), self.part.sequence_dims[name]).clone()
        return x.requires_grad_(x.is_floating_point())

    def _output_gradient(self, name: str, shape: torch.Size, case: Case) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed} {name}".encode()))
        full = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.torch_dtype)
        return self.strategy.shard(full.to(self.device), self.part.output_dims[name])

    def _watch_routers(self, batch: int, given: Mapping[str, np.ndarray]) -> None:
        """Make routers return the choices in ``given``; if there are none, keep the routers' own."""
        for name, module in self.module.named_modules():
            if isinstance(module, impls.Router):
                own = partial(self._noted, name, batch, module.choose)
                choose: Any = self._given(given[name]) if given else own
                module.choose = choose  # type: ignore[method-assign]

    def _noted(self, name: str, batch: int, choose: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        """A router's choice of experts [tokens, k], which is kept in ``choices`` as [B, L, k]."""
        experts = choose(scores)
        self.choices[name] = experts.unflatten(0, (batch, -1)).cpu().numpy()
        return experts

    def _given(self, experts: np.ndarray) -> Callable[[Tensor], Tensor]:
        """A function that returns the choices of this rank's tokens, from those of all tokens [B, L, k]."""
        here = impls.positions_of(self.strategy, self.strategy.place, experts.shape[1])
        mine = torch.from_numpy(experts[:, here]).flatten(0, 1)
        return lambda scores: mine.to(scores.device, copy=True)

    def _summed(self, x: Tensor | None) -> Tensor | None:
        """The sum of all ranks' shares of a loss, or of a value that follows from shares of a loss."""
        group = self.strategy.place.group(*self.strategy.position_axes)
        return x if x is None or group is None else impls.all_reduce(x.detach().clone(), group)


def _build(case: Case, build: Any, strategy: impls.Strategy, dtype: torch.dtype, device: str) -> nn.Module:
    with impls.default_dtype(dtype), torch.device(device):
        module: nn.Module = build(strategy, case.seq_len)
    return module


def _set_weights(case: Case, module: nn.Module, held: Iterable[Tensor]) -> None:
    """Draw the module's weights, then round this rank's weights ``held`` to the case's dtype."""
    impls.initialize(module, case.seed, deviation=DEVIATION, everything=True)
    with torch.no_grad():
        for values in held:
            values.copy_(values.to(case.torch_dtype))


@dataclass(frozen=True)
class OneDeviceRun:
    """The tensors of a run on one device, without its module, because a rank keeps many runs and its garbage
    collector visits their objects after each job. The attributes are those of :class:`VerifiedRun`."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor | None]
    shapes: Mapping[str, torch.Size]
    experts: Set[str]
    choices: Mapping[str, np.ndarray]
    sites: Sites

    @classmethod
    def of(cls, run: VerifiedRun) -> OneDeviceRun:
        """The tensors of a run, without its module."""
        return cls(run.inputs, run.outputs, run.tensors(), run.shapes, run.experts, run.choices, run.sites)


def share_of(truth: OneDeviceRun, checked: VerifiedRun) -> dict[str, Tensor]:
    """This rank's share of the tensors that one device computed, by name."""
    strategy, part = checked.strategy, checked.part
    kept = checked.backend.gradient_places()
    share = {}
    for name, x in truth.tensors.items():
        assert x is not None, f"the oracle has no {name}"
        kind, _, key = name.rpartition(" ")
        if kind == "output":
            share[name] = strategy.shard(x, part.output_dims[key])
        elif kind == "gradient of input":
            share[name] = strategy.shard(x, part.sequence_dims[key])
        elif key in truth.experts and key not in checked.shards:
            continue  # an expert of other ranks, which :func:`check_elements` counts on those ranks
        elif key in kept or key not in checked.shards:
            shard = checked.shards.get(key)
            x = x.view(truth.shapes[key])
            mine = shard.of(x) if shard else x
            share[name] = kept[key].of(mine) if key in kept else mine
    return share


@dataclass
class Sites:
    """Attributes:
    values: the tensors that went into and came out of the sites in forward, as "k of attention 0". gradients:
    their gradients by the same names, once backward has reached them. order: when forward came to each of
    these, and to each module by its name.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, x: Any, at: int) -> None:
        """Keep a tensor under a name, with its place ``at`` in the order, and its gradient after backward."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        self.values[name], self.order[name] = x.detach().clone(), at
        if x.requires_grad:

            def keep(gradient: Tensor) -> None:
                self.gradients[name] = gradient.detach().clone()

            x.register_hook(keep)


@contextmanager
def watched(strategy: impls.Strategy, module: nn.Module) -> Iterator[Sites]:
    """A context whose value gets the tensors at the sites of attention that the module's forward reaches,
    without the sites that recomputation in backward reaches again."""
    sites, clock, calls = Sites(), itertools.count(), itertools.count()
    inside = False

    def watch(method: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # a site that another site calls
                return method(*args, **kwargs)
            inside, number = True, next(calls)
            try:
                for letter, x in zip("qkv", args, strict=False):
                    sites.note(f"{letter} of attention {number}", x, next(clock))
                o = method(*args, **kwargs)
                sites.note(f"o of attention {number}", o, next(clock))
                return o
            finally:
                inside = False

        return attend

    def begun(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            sites.order.setdefault(name, next(clock))

        return note

    with ExitStack() as stack:
        for name in SITES:
            setattr(strategy, name, watch(getattr(strategy, name)))
            stack.callback(delattr, strategy, name)
        for name, each in module.named_modules():
            stack.callback(each.register_forward_pre_hook(begun(name)).remove)
        yield sites
