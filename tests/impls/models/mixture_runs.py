"""Gradients of a model with experts on the ranks of a mesh, beside those of one device in float64."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.engines.plan import Plan, RankClass
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.composition import ONE_STAGE, Composition, composed_traffic
from spbench.impls.layout import shard_of
from spbench.impls.models.model import Model
from spbench.impls.options import set_options
from spbench.impls.place import Place
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.step import PRECISIONS, Training, default_dtype, initialize

BATCH, LENGTH = 4, 24


@dataclass(frozen=True)
class Setting:
    """What is run on a mesh: sizes with ep and etp, the strategy, and the options of a model."""

    sizes: Mapping[str, int]
    strategy: str = "ulysses"
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "moe-tiny"
    backend: str = "legacy_ddp"
    micro_batches: int = 1
    zigzag: bool = False


def training_of(model: Model, strategy: Strategy, setting: Setting, around: Composition) -> Training:
    with default_dtype(torch.float64):
        module = model.build(strategy, LENGTH)
    initialize(module, 0, deviation=0.2, everything=True)
    _choice_biases(module)
    return Training(
        module,
        strategy,
        PRECISIONS["fp64"],
        backend=setting.backend,
        around=around,
        micro_batches=setting.micro_batches,
    )


def _choice_biases(module: nn.Module) -> None:
    """Give biases of the choice values, as training does in the course of time."""
    for buffer in (each for name, each in module.named_buffers() if name.endswith("choice_bias")):
        buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))


def whole_inputs(model: Model) -> dict[str, torch.Tensor]:
    inputs = model.inputs(BATCH, LENGTH, torch.Generator().manual_seed(0))
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def on_one_device(setting: Setting) -> dict[str, torch.Tensor]:
    """The gradients, by plain operators, of as many micro-batches as the replicas run together."""
    replicas = 1 if setting.options.get("aux_loss") == "global" else setting.sizes.get("dp", 1)
    parts = setting.micro_batches * replicas
    return _gradients_of_one_device(
        pickle.dumps(Setting({}, "", setting.options, setting.model, micro_batches=parts))
    )


@lru_cache(maxsize=64)
def _gradients_of_one_device(pickled: bytes) -> dict[str, torch.Tensor]:
    """A pickled setting without a mesh; a rank compares one mesh after another with the same ones."""
    alone = pickle.loads(pickled)
    model = model_preset(alone.model, alone.options)
    plain = set_options(model, model.plain_options, "")
    training = training_of(plain, Strategy(), alone, Composition())
    training.gradients(whole_inputs(model))
    return {n: p.grad for n, p in training.module.named_parameters() if p.grad is not None}


def worst_of_rank(mesh: DeviceMesh, setting: Setting) -> tuple[float, str, list[dict[str, Any]]]:
    """The largest relative error of a gradient on this rank, whose it is, and where bytes differ from the
    closed forms."""
    model = model_preset(setting.model, setting.options)
    place = Place.on(mesh, setting.sizes)
    strategy = nesting(setting.strategy).configured(place, {"placement": "zigzag"} if setting.zigzag else {})
    around = Composition(place)
    training = training_of(model, strategy, setting, around)
    inputs = {
        name: strategy.shard(x.chunk(around.replicas)[around.replica], model.sequence_dims[name])
        for name, x in whole_inputs(model).items()
    }
    recorder = Recorder(mesh)
    recorder.meters = [recorder.communication]
    recorder.communication.axes.update(place.flattened)
    with recorder:
        training.gradients(inputs, recorder.phase)
    truth = on_one_device(setting)
    errors = {}
    for name, p in training.module.named_parameters():
        shard = shard_of(p)
        expected = shard.of(truth[name]) if shard else truth[name]
        assert p.grad is not None, name
        errors[name] = float((p.grad - expected).norm() / (expected.norm() + 1e-30))
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst, differences(recorder, model, strategy, setting, around)


def differences(
    recorder: Recorder, model: Model, strategy: Strategy, setting: Setting, around: Composition
) -> list[dict[str, Any]]:
    """Where forward and backward sent other bytes than the closed forms say."""
    batch = BATCH // around.replicas // setting.micro_batches
    sites = model.sites(batch, LENGTH, strategy.vocabulary_parts)
    entries = [
        *composed_traffic(sites, strategy, ONE_STAGE, setting.micro_batches, 8, lambda elements: 8 * elements)
    ]
    entries = [t for t in entries if t.phase in ("forward", "backward")]
    plan = Plan([RankClass(ONE_STAGE, {}, (0,))], [entries], strategy.place.sizes)
    found = plan.difference(recorder.communication, 0, has_values=True)
    return [each for each in found if each["phase"] in ("forward", "backward")]
