"""What a strategy computes on one rank beside what the single device computes, tensor by tensor.

The oracle is the model on one device in float64, with torch's own kernels where the model has a choice,
so that it shares no hand-written backward with what it judges (the layer norm, which has no other way, is
compared with torch's in its unit test). The strategy then runs the same part of the model on this rank's
shards, with gradients synchronised by the code that training uses. Dropout is off on both sides.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.meters.recorder import Recorder
from spbench.bench.verification.beside_values import check_bytes, check_elements, check_positions
from spbench.bench.verification.discrepancy import Discrepancy, discrepancies, relative_errors
from spbench.bench.verification.documents import check_documents, masked_attention
from spbench.impls.as_published.as_published import AsPublished
from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.axes import Place
from spbench.impls.backends.backend import BackendSettings
from spbench.impls.backends.meta_device import WholeParameters, attributes_of
from spbench.impls.collectives import all_reduce
from spbench.impls.composition import Composition
from spbench.impls.models.model import Model
from spbench.impls.options import set_options, with_options
from spbench.impls.registries import DEFAULT_BACKEND, backend_class
from spbench.impls.strategies.base import Strategy, shard_of
from spbench.impls.strategies.nesting import Nesting
from spbench.impls.training.step import PRECISIONS, Precision, default_dtype, initialize

#: standard deviation of weights: with the 0.02 of training every softmax of a tiny model would be almost
#: flat and the gradients of queries and keys tiny
DEVIATION = 0.2

#: runs of one device that a rank keeps; a tiny model's takes a megabyte
KEPT_RUNS = 128


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        strategy, options: the class, or several around each other, and the options. No name, so that workers
            need no registry.
        model: with its options set.
        part: a key of ``model.parts()``.
        dtype: a key of PRECISIONS: of weights, activations and gradients of the checked run.
        batch, seq_len: whole sizes, in samples and positions.
        seed: of weights, inputs and the gradient of the outputs.
        backend, backend_options: what holds and synchronises gradients; see :class:`Training`.
    """

    strategy: type[Strategy] | Nesting
    model: Model
    part: str
    dtype: str = "fp64"
    batch: int = 3
    seq_len: int = 24
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    backend: str = DEFAULT_BACKEND
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return PRECISIONS[self.dtype].parameters


@dataclass(frozen=True)
class Finding:
    """One tensor on one rank.

    Attributes:
        tensor: "output y", "gradient of input x", "gradient of layer.qkv.weight", or "positions of ...".
        found: of the strategy against the oracle.
        noise: relative error, on the same part of the same tensor, of the single device in the case's dtype.
        tells: how much it tells of a fault beside others: 0 of a message or a count, "backward all_reduce
            over sp", 1 of values, 2 of documents that see each other.
        departs: whether it is of a published baseline's own function against the model, and no fault.
    """

    tensor: str
    found: Discrepancy
    noise: float
    tells: int = 1
    departs: bool = False


class _OneDevice(Strategy):
    """The single device, with the padding of the vocabulary that ``parts`` ranks need."""

    def __init__(self, parts: int):
        super().__init__()
        self.parts = parts

    @property
    def vocabulary_parts(self) -> int:
        return self.parts

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        if attended.plain and sinks is None:
            return super().causal_attention(q, k, v)
        return masked_attention(q, k, v, attended, sinks)


def check_rank(mesh: DeviceMesh, case: Case) -> list[Finding]:
    """Compare what this rank of the mesh computes with its share of what one device computes, both on the
    mesh's device."""
    model = with_options(case.model, {"dropout": 0.0})
    place = Place.on(mesh)
    strategy = case.strategy.configured(place, case.options)
    plain = Case(
        Strategy,
        with_options(model, model.plain_options),
        *(case.part, case.dtype, case.batch, case.seq_len, case.seed),
    )

    of_model: Strategy = _OneDevice(strategy.vocabulary_parts)
    reference = strategy.on_one_device() if isinstance(strategy, AsPublished) else of_model

    def on_one_device(dtype: torch.dtype, strategy: Strategy = reference) -> VerifiedRun:
        return _on_one_device(pickle.dumps((plain, strategy, dtype, mesh.device_type)))

    truth = on_one_device(torch.float64)
    shapes = {name: x.shape for name, x in truth.outputs.items()}
    recorder = Recorder(mesh)
    recorder.meters = [recorder.communication]
    checked = VerifiedRun(
        replace(case, model=model),
        strategy,
        case.torch_dtype,
        shapes,
        Composition(place),
        device=mesh.device_type,
        recorder=recorder,
    )
    expected = _share(truth, checked)
    found = discrepancies(expected, checked.tensors())
    if case.torch_dtype is torch.float64:
        noise = dict.fromkeys(found, 0.0)
    else:
        noise = relative_errors(expected, _share(on_one_device(case.torch_dtype), checked))
    departures: dict[str, Discrepancy] = {}
    if reference is not of_model:
        model_share = _share(on_one_device(torch.float64, of_model), checked)
        departures = discrepancies(model_share, expected)
    return [
        *(Finding(name, each, 0.0, departs=True) for name, each in departures.items()),
        *(Finding(name, each, noise.get(name, 0.0)) for name, each in found.items()),
        *(Finding(name, each, 0.0) for name, each in check_positions(truth, checked)),
        *(Finding(name, each, 0.0, tells=2) for name, each in check_documents(truth, checked)),
        Finding(*check_elements(checked), 0.0),
        *(Finding(name, each, 0.0, tells=0) for name, each in check_bytes(recorder, case, model, checked)),
    ]


@lru_cache(maxsize=KEPT_RUNS)
def _on_one_device(pickled: bytes) -> VerifiedRun:
    """The run of a case on one device, of the pickled arguments: most strategies are verified on the same
    models, one after another. Nobody writes to what it holds."""
    case, strategy, dtype, device = pickle.loads(pickled)
    return VerifiedRun(case, strategy, dtype, device=device)


class VerifiedRun:
    """Forward, backward and gradient sync of the case's part with a strategy, on this rank's shards.

    Args:
        dtype: of the arithmetic. Weights and inputs have in every run the values that the case's dtype
            can hold, so that only arithmetic differs.
        shapes: of the whole outputs; None where the outputs are whole.
        around: the mesh's, for the backend's groups.
        device: where all tensors are; values are drawn on the CPU, the same for every device.
        recorder: sees what is communicated.
    """

    def __init__(
        self,
        case: Case,
        strategy: Strategy,
        dtype: torch.dtype,
        shapes: Mapping[str, torch.Size] | None = None,
        around: Composition | None = None,
        *,
        device: str,
        recorder: Recorder | None = None,
    ):
        self.strategy, self.part, self.device = strategy, case.model.parts()[case.part], device
        cls = backend_class(case.backend)
        options = set_options(cls.options_type(), case.backend_options, f"backend {case.backend}")
        on_meta, build = cls.starts_on_meta(options), partial(_build, case, self.part.build, strategy, dtype)
        self.module = build("meta" if on_meta else device)
        if not on_meta:
            _set_weights(case, self.module, self.module.parameters())
        # noted before a backend takes the parameters over
        self.shards = {name: shard_of(p) for name, p in self.module.named_parameters()}
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        attributes = attributes_of(self.module)
        settings = BackendSettings(moments="later", options=options)
        self.backend = cls(self.module, strategy, around or Composition(), Precision(dtype), settings)
        if on_meta:
            parts = self.backend.weight_parts()
            weights = WholeParameters(self.module, parts, attributes, partial(build, "cpu"))
            _set_weights(case, weights, [part.values for part in parts.values()])
        self.backend.zero()
        whole = self.part.inputs(case.batch, case.seq_len, torch.Generator().manual_seed(case.seed))
        self.inputs = {name: self._input(name, x, case.torch_dtype, dtype) for name, x in whole.items()}

        if recorder is not None:
            recorder.communication.axes.update(strategy.place.flattened)
        phase = nullcontext if recorder is None else recorder.phase
        with recorder or nullcontext():
            with phase("forward"):
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

    def tensors(self) -> dict[str, Tensor | None]:
        """What is compared, by name: this rank's part, or the group's sum of what ranks share; of a gradient
        what the backend keeps of it."""
        found: dict[str, Tensor | None] = {}
        for name, x in self.outputs.items():
            shared = self.part.output_dims[name] is None
            found[f"output {name}"] = self._summed(x) if shared else x
        for name, x in self.inputs.items():
            if x.requires_grad:
                # of an input that every rank holds whole, each has the gradient of its share of the loss
                shared = self.part.sequence_dims[name] is None
                found[f"gradient of input {name}"] = self._summed(x.grad) if shared else x.grad
        gradients = self.backend.gradient_parts()
        for name in self.backend.gradient_places():
            found[f"gradient of {name}"] = gradients[name].values if name in gradients else None
        return found

    def _input(self, name: str, whole: Tensor, values: torch.dtype, dtype: torch.dtype) -> Tensor:
        if whole.is_floating_point():
            whole = whole.to(values).to(dtype)
        x = self.strategy.shard(whole.to(self.device), self.part.sequence_dims[name]).clone()
        return x.requires_grad_(x.is_floating_point())

    def _output_gradient(self, name: str, shape: torch.Size, case: Case) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed} {name}".encode()))
        whole = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.torch_dtype)
        return self.strategy.shard(whole.to(self.device), self.part.output_dims[name])

    def _summed(self, x: Tensor | None) -> Tensor | None:
        """The sum of the shares of a loss, or of what follows from one, over the ranks that have shares."""
        group = self.strategy.place.group(*self.strategy.position_axes)
        return x if x is None or group is None else all_reduce(x.detach().clone(), group)


def _build(case: Case, build: Any, strategy: Strategy, dtype: torch.dtype, device: str) -> nn.Module:
    with default_dtype(dtype), torch.device(device):
        module: nn.Module = build(strategy, case.seq_len)
    return module


def _set_weights(case: Case, module: nn.Module, held: Iterable[Tensor]) -> None:
    """Draw the module's weights; ``held`` is where this rank has them."""
    initialize(module, case.seed, deviation=DEVIATION, everything=True)
    with torch.no_grad():
        for values in held:
            values.copy_(values.to(case.torch_dtype))


def _share(whole: VerifiedRun, checked: VerifiedRun) -> dict[str, Tensor]:
    """This rank's share of what one device computed."""
    strategy, part = checked.strategy, checked.part
    kept = checked.backend.gradient_places()
    share = {}
    for name, x in whole.tensors().items():
        assert x is not None, f"the oracle has no {name}"
        kind, _, key = name.rpartition(" ")
        if kind == "output":
            share[name] = strategy.shard(x, part.output_dims[key])
        elif kind == "gradient of input":
            share[name] = strategy.shard(x, part.sequence_dims[key])
        elif key in kept or key not in checked.shards:
            shard = checked.shards.get(key)
            x = x.view(whole.shapes[key])
            mine = shard.of(x) if shard else x
            share[name] = kept[key].of(mine) if key in kept else mine
    return share
