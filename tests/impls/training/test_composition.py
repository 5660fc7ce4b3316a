"""Data and pipeline parallelism around each strategy give the single device's loss and gradients.
What pipeline stages send beside its closed form, and sizes that cannot be divided."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.judged import relative_errors
from spbench.impls.backends.optimizer import PRECISIONS, default_dtype
from spbench.impls.collectives import all_reduce
from spbench.impls.composition import Composition, rank_module
from spbench.impls.models.model import Model, model_preset
from spbench.impls.place import Place
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Strategy, shard_of
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.pipeline import summed
from spbench.impls.training.step import Training, initialize
from spbench.impls.training.turns import Turns
from tests.slow import slow

BATCH, LENGTH = 8, 24
OPTIONS = {"layers": 4, "vocabulary_multiple": 2}

#: ways in which a rank takes its turns
TURNS: dict[str, Callable[..., Turns]] = {
    "groups": partial(Turns, group_size=3),
    "overlapped": partial(Turns, overlapped=True),
    "overlapped groups": partial(Turns, group_size=5, overlapped=True),
}
#: layers of stages, of four
STAGE_LAYERS = {"uneven": (1, 3), "layers of the middle": (0, 2, 2, 0), "one layer less": (0, 1, 2, 1)}


def whole_batch(model: Model) -> dict[str, torch.Tensor]:
    whole = model.inputs(BATCH, LENGTH, torch.Generator().manual_seed(3))
    return {k: x.double() if x.is_floating_point() else x for k, x in whole.items()}


@lru_cache(maxsize=16)
def on_one_device(pickled: bytes) -> tuple[nn.Module, torch.Tensor]:
    """A pickled model with its gradients, and its loss, which a rank compares with one mesh after another."""
    model = pickle.loads(pickled)
    with default_dtype(torch.float64):
        module = model.build(Strategy(), LENGTH)
    initialize(module, 5, deviation=0.1, everything=True)
    loss = module(whole_batch(model))["loss"]
    loss.backward()
    return module, loss.detach()


def errors_of_rank(
    mesh: DeviceMesh,
    name: str,
    micro_batches: int,
    schedule: str,
    gradients: str,
    fault: str,
    model: Model | None = None,
) -> dict[str, float]:
    """Relative errors of the loss and of every gradient that this rank holds, in float64."""
    model, precision = model or model_preset("bert-tiny", OPTIONS), PRECISIONS["fp64"]
    whole = whole_batch(model)
    place = Place.on(mesh)
    strategy = nesting(name).configured(place)
    schedule, _, how = schedule.partition(": ")
    around = Composition(place, 2 if schedule == "interleaved" else 1, STAGE_LAYERS.get(how, ()))
    turns = TURNS[how](around.stage.index, around.stage.count, 2, micro_batches) if how in TURNS else None
    with default_dtype(torch.float64):
        # the padded vocabulary of one device and of the ranks is the same: 96 rows
        module = rank_module(partial(model.build, strategy, LENGTH), around)
    initialize(module, 5, deviation=0.1, everything=True)
    if fault == "layers of the other chunk":
        module[0].blocks, module[1].blocks = module[1].blocks, module[0].blocks  # type: ignore[index]
    reference, reference_loss = on_one_device(pickle.dumps(model))

    training = Training(
        module,
        strategy,
        precision,
        around=around,
        micro_batches=micro_batches,
        schedule=schedule,
        turns=turns,
        backend_options={"gradients": gradients},
    )
    if fault == "untied":
        around.add_tied = lambda module, gradient=None: None  # type: ignore[method-assign]
    if fault == "one replica":
        around.dp_group = None
    mine = {
        k: strategy.shard(
            x if k in model.unbatched else x.chunk(around.replicas)[around.replica], model.sequence_dims[k]
        )
        for k, x in whole.items()
    }
    training.backend.zero()
    loss = training.pipeline.run(training._split(mine), lambda x: x, lambda phase: nullcontext())
    training.backend.synchronize()

    expected, got = gradients_of(reference, module)
    if around.stage.last:
        all_reduce(loss, place.group(*strategy.position_axes))
        expected["loss"] = reference_loss
        got["loss"] = all_reduce(loss, place.group("dp"))
    return relative_errors(expected, got)


Gradients = dict[str, torch.Tensor | None]


def gradients_of(reference: nn.Module, module: nn.Module) -> tuple[Gradients, Gradients]:
    """The gradients that a rank should hold by those of one device, and those that it holds, by parameter."""
    truth = dict(reference.named_parameters())
    expected, got = Gradients(), Gradients()
    for name, parameter in module.named_parameters():
        gradient, shard = truth[name].grad, shard_of(parameter)
        assert gradient is not None
        expected[name] = shard.of(gradient) if shard else gradient
        got[name] = parameter.grad
    return expected, got


#: strategy, sizes in the order of the mesh, micro-batches, schedule
COMPOSED = [
    ("single", {"pp": 2}, 4, "1f1b"),
    ("single", {"pp": 4}, 2, "1f1b"),  # fewer micro-batches than stages
    ("single", {"pp": 4}, 8, "1f1b"),
    ("single", {"pp": 2}, 4, "gpipe"),
    ("single", {"pp": 2}, 4, "interleaved"),
    ("single", {"pp": 2}, 8, "interleaved: groups"),  # two of three micro-batches, and one of two
    ("single", {"pp": 2}, 4, "interleaved: overlapped"),
    ("single", {"pp": 2}, 8, "interleaved: overlapped groups"),
    ("single", {"pp": 2}, 4, "1f1b: uneven"),
    ("single", {"pp": 2}, 4, "interleaved: layers of the middle"),
    ("single", {"pp": 2}, 4, "interleaved: one layer less"),
    ("single", {"pp": 2}, 2, "interleaved"),  # all forwards before the first backward
    ("tensor_parallel", {"pp": 2, "tp": 2}, 4, "interleaved"),
    ("single", {"dp": 4}, 1, "1f1b"),
    ("single", {"dp": 2, "pp": 2}, 2, "1f1b"),
    ("single", {}, 4, "1f1b"),  # gradient accumulation
    ("tensor_parallel", {"pp": 2, "tp": 2}, 4, "1f1b"),
    ("tensor_parallel", {"tp": 2, "dp": 2}, 2, "1f1b"),
    ("ring_self_attention", {"sp": 2, "pp": 2}, 4, "1f1b"),
    ("ring_self_attention", {"pp": 2, "sp": 2}, 2, "gpipe"),
    ("ring_self_attention", {"dp": 2, "sp": 2}, 1, "1f1b"),
    ("ring_self_attention", {"sp": 2, "dp": 2}, 1, "1f1b"),
    ("megatron_sp+ring_self_attention", {"tp": 2, "sp": 2}, 2, "1f1b"),
]


def with_gradients() -> Iterator[Any]:
    """Each of the compositions with both kinds of gradients; with stale ones three of them in every run."""
    for composed in COMPOSED:
        name, sizes, _, schedule = composed
        interleaved = schedule.startswith("interleaved")
        alike = sizes in ({"sp": 2, "dp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}) or schedule == "gpipe"
        seldom = (interleaved and name != "single") or (alike and name != "single") or sizes == {"pp": 4}
        yield pytest.param(*composed, "contiguous", marks=pytest.mark.slow if seldom else [])
        always = (name, sizes) in (("single", {"pp": 2}), ("single", {"dp": 4}), COMPOSED[-1][:2])
        yield pytest.param(*composed, "stale", marks=[] if always and not interleaved else pytest.mark.slow)


def assert_right(by_rank: list[dict[str, float]]) -> None:
    for errors in by_rank:
        assert max(errors.values()) < 1e-10, max(errors, key=errors.__getitem__)
    assert any("loss" in errors for errors in by_rank)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "sizes", "micro_batches", "schedule", "gradients"), [*with_gradients()])
def test_loss_and_every_gradient(
    pool: RankPool, name: str, sizes: dict[str, int], micro_batches: int, schedule: str, gradients: str
) -> None:
    assert_right(pool.run(sizes, errors_of_rank, name, micro_batches, schedule, gradients, ""))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("tensor_parallel+ring_self_attention", "bert-tiny", {"layers": 4, "vocabulary_multiple": 1}),
        ("megatron_sp+ring_self_attention", "bert-tiny-linformer", {}),
        ("megatron_sp+ring_attention", "causal-transformer-tiny", {"tied": True}),
        ("tensor_parallel+ulysses", "causal-transformer-tiny", {}),
        ("megatron_sp+lasp", "linear-llama3-tiny", {}),
        ("megatron_sp+ring_attention", "mla-tiny", {"layers": 4, "mtp_layers": 2}),
        ("tensor_parallel+lasp2", "tnl-tiny", {"attention_norm": "head"}),
    ],
)
def test_four_axes_on_sixteen_ranks(name: str, model: str, options: dict[str, Any]) -> None:
    sizes = {"dp": 2, "pp": 2, "tp": 2, "sp": 2}
    with RankPool(16) as pool:
        preset = model_preset(model, options)
        by_rank = pool.run(sizes, errors_of_rank, name, 2, "1f1b", "contiguous", "", preset, timeout_s=300)
    assert len(by_rank) == 16
    assert_right(by_rank)


TIED = model_preset("causal-transformer-tiny", {"layers": 8, "tied": True})
#: the last stage has the embedding of tokens to predict further ones from
PREDICTING = model_preset("mla-tiny", {"layers": 4, "mtp_layers": 2, "vocabulary_multiple": 2})
OF_MODELS = [
    ("megatron_sp", {"pp": 2, "tp": 2}, 2, "1f1b", PREDICTING),
    slow("ring_attention", {"pp": 2, "sp": 2}, 4, "interleaved", PREDICTING),
    ("dsp", {"sp": 2, "dp": 2}, 2, "1f1b", model_preset("st-dit-tiny", {"temporal": 6})),
    slow("megatron_sp", {"tp": 2, "dp": 2}, 2, "1f1b", model_preset("st-dit-tiny", {"temporal": 6})),
    slow("single", {"pp": 4}, 8, "interleaved", model_preset("bert-tiny", {"layers": 8})),
    slow("single", {"pp": 4}, 8, "interleaved", TIED),
    ("single", {"pp": 4}, 8, "interleaved: overlapped", TIED),
]


@pytest.mark.parametrize(("name", "sizes", "micro_batches", "schedule", "model"), OF_MODELS)
def test_other_models(
    pool: RankPool, name: str, sizes: dict[str, int], micro_batches: int, schedule: str, model: Model
) -> None:
    assert_right(pool.run(sizes, errors_of_rank, name, micro_batches, schedule, "contiguous", "", model))


@pytest.mark.parametrize(
    ("fault", "sizes", "schedule", "tensor"),
    [
        ("untied", {"pp": 2}, "1f1b", "embeddings.words.weight"),
        ("untied", {"pp": 2}, "interleaved", "embeddings.words.weight"),
        ("layers of the other chunk", {"pp": 2}, "interleaved", "embeddings.words.weight"),
        ("one replica", {"dp": 2}, "1f1b", "blocks.0.attention.qkv.weight"),
    ],
)
def test_planted_faults_are_seen(
    pool: RankPool, fault: str, sizes: dict[str, int], schedule: str, tensor: str
) -> None:
    by_rank = pool.run(sizes, errors_of_rank, "single", 2, schedule, "contiguous", fault)
    assert all(errors[tensor] > 1e-3 for errors in by_rank)


SEQ_LEN = 24


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["single", "tensor_parallel", "ring_self_attention"])
@pytest.mark.parametrize(("pp", "dp"), [(4, 2), slow(1, 1), slow(1, 2), slow(4, 1)])
@pytest.mark.parametrize("precision", ["fp16", slow("fp32")])
def test_every_stage_sends_what_the_closed_form_says(strategy: str, pp: int, dp: int, precision: str) -> None:
    cls = strategy_class(strategy)
    cell = Cell(
        model="bert-tiny",
        strategy=strategy,
        sizes=Sizes(dp=dp, pp=pp, **dict.fromkeys(cls.axes, 4)),
        batch=16,
        seq_len=SEQ_LEN,
        precision=precision,  # type: ignore[arg-type]
        model_options=OPTIONS,
        training=TrainingOptions(micro_batches=8),
    )
    result = VirtualEngine().measure(cell)
    assert result.formula_difference == []
    if pp * dp > 1 or cls.axes:
        assert result.communication


def test_virtual_stages_are_those_of_one_schedule() -> None:
    with pytest.raises(ValueError, match="virtual_stages is for schedule: interleaved"):
        TrainingOptions(virtual_stages=2)
    with pytest.raises(ValueError, match="schedule: interleaved needs virtual_stages: 2 or more"):
        TrainingOptions(schedule="interleaved")


def interleaved_cell(pp: int, virtual_stages: int, strategy: str = "single", **axes: int) -> Cell:
    interleaved = {"schedule": "interleaved", "virtual_stages": virtual_stages} if virtual_stages > 1 else {}
    return Cell(
        model="bert-tiny",
        strategy=strategy,
        sizes=Sizes(pp=pp, **axes),
        batch=16,
        seq_len=SEQ_LEN,
        precision="fp16",
        model_options={"layers": 8, "vocabulary_multiple": 2},
        training=TrainingOptions.model_validate({"micro_batches": 8, **interleaved}),
        cluster="dgx-a100",
    )


@pytest.mark.parametrize(("strategy", "axes"), [("single", {}), slow("megatron_sp", {"tp": 2})])
def test_interleaved_stages_send_what_the_closed_form_says(strategy: str, axes: dict[str, int]) -> None:
    assert VirtualEngine().measure(interleaved_cell(2, 2, strategy, **axes)).formula_difference == []


def test_an_interleaved_rank_runs_ahead_by_all_its_forwards_at_most() -> None:
    assert [Turns(rank, ranks=4, chunks=2, micro_batches=4).ahead for rank in range(4)] == [8, 8, 6, 4]
    assert Turns(0, ranks=4, chunks=2, micro_batches=8).ahead == 10


def test_a_stage_without_losses_has_zero_where_its_inputs_are() -> None:
    inputs = [{"tokens": torch.empty(2, device="meta")}]
    assert summed([], inputs).device.type == "meta"
    assert summed([torch.tensor(1.0), torch.tensor(2.0)], inputs) == 3
