"""The training step: mixed precision, loss scaling, optimizer, gradient buffers, dropout, initial weights.
Data and pipeline parallelism around each strategy give the single device's loss and gradients.
What pipeline stages send beside its closed form, and sizes that cannot be divided."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.judged import relative_errors
from spbench.impls.collectives import all_reduce
from spbench.impls.composition import Composition, rank_module
from spbench.impls.kernels.dropout import DropoutRandom, masked_dropout
from spbench.impls.models.model import Model
from spbench.impls.place import Place
from spbench.impls.registries import model_preset, strategy_class
from spbench.impls.strategies.base import Strategy, shard_of
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.pipeline import summed
from spbench.impls.training.step import PRECISIONS, Precision, Training, default_dtype, initialize
from spbench.impls.training.turns import Turns
from tests.cells import make_cell
from tests.grid import data, tabled
from tests.slow import slow

AXES = {"tensor_parallel": "tp", "ring_self_attention": "sp"}


def made(
    strategy: Strategy, precision: Precision, model: Model | None = None, **options: Any
) -> tuple[Training, dict[str, Tensor]]:
    """A training of the tiny BERT, and this rank's part of its data."""
    model = model or model_preset("bert-tiny")
    with default_dtype(precision.parameters):
        module = model.build(strategy, 24)
    initialize(module, 3, deviation=0.1)
    inputs = model.inputs(2, 24, torch.Generator().manual_seed(0))
    parts = {name: strategy.shard(whole, model.sequence_dims[name]) for name, whole in inputs.items()}
    return Training(module, strategy, precision, **options), parts


def weights(training: Training) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in training.module.named_parameters()}


# -- the optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["kept", "later"])
def test_three_steps_are_those_of_adamw(moments: str) -> None:
    training, inputs = made(Strategy(), PRECISIONS["fp32"], moments=moments)
    reference, _ = made(Strategy(), PRECISIONS["fp32"])
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
    adam = torch.optim.AdamW(reference.module.parameters(), **settings, fused=True)
    for _ in range(3):
        loss = training.step(inputs)
        adam.zero_grad(set_to_none=False)
        expected = reference.module(inputs)["loss"]
        expected.backward()
        adam.step()
        assert torch.equal(loss, expected.detach())
    assert weights(training).keys() == weights(reference).keys()
    assert all(torch.equal(weights(training)[name], value) for name, value in weights(reference).items())
    assert training.steps == 3


@pytest.mark.parametrize("gradients", ["contiguous", "stale"])
def test_master_weights_keep_what_half_precision_drops(gradients: str) -> None:
    """Steps far below a half's last digit add up in the masters, which are those of float32 training."""
    precision = Precision(torch.float16, master=True, loss_scale=2.0**10)
    training, inputs = made(Strategy(), precision, backend_options={"gradients": gradients})
    before = [master.detach().clone() for master in training.optimizer.masters]
    for _ in range(2):
        training.step(inputs)
    pairs = [*zip(training.optimizer.masters, training.optimizer.parameters, strict=True)]
    for (master, p), old in zip(pairs, before, strict=True):
        assert master.dtype == torch.float32
        assert p.dtype == torch.float16
        assert torch.equal(p, master.half())
        assert 0 < (master - old).abs().max().item() < 1e-3
    assert any(not torch.equal(master, p.float()) for master, p in pairs)


def test_loss_scale_does_not_change_the_update() -> None:
    after = []
    for scale in (None, 2.0**10):
        training, inputs = made(Strategy(), Precision(torch.float32, master=True, loss_scale=scale))
        training.step(inputs)
        after.append(weights(training))
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["single", *AXES])
def test_contiguous_and_stale_gradients_give_the_same_update(pool: RankPool, strategy: str) -> None:
    n = 1 if strategy == "single" else 3
    assert all(pool.run({AXES.get(strategy, "sp"): n}, same_update_whatever_the_buffers, strategy))


def same_update_whatever_the_buffers(mesh: DeviceMesh, name: str) -> bool:
    after, place = [], Place.on(mesh)
    for gradients in ("contiguous", "stale"):
        options: dict[str, Any] = {"around": Composition(place), "backend_options": {"gradients": gradients}}
        training, inputs = made(strategy_class(name)(place), PRECISIONS["fp32"], **options)
        for _ in range(3):
            training.step(inputs)
        after.append(weights(training))
    return all(torch.equal(after[0][key], after[1][key]) for key in after[0])


# -- overflow -----------------------------------------------------------------------------------------------


def after_an_overflow(mesh: DeviceMesh, strategy: str, gradients: str) -> dict[str, Any]:
    """A step whose gradients overflow on rank 1 alone, then one that is fine."""
    training, inputs = made(
        strategy_class(strategy)(Place.on(mesh)), PRECISIONS["fp16"], backend_options={"gradients": gradients}
    )
    training.optimizer.scale.fill_(2.0**8)
    before = weights(training)
    masters = [master.detach().clone() for master in training.optimizer.masters]
    synchronize = training.backend.synchronize

    def planted() -> None:
        synchronize()
        if dist.get_rank() == 1:
            gradient = training.optimizer.parameters[0].grad
            gradient.view(-1)[0] = torch.inf

    training.backend.synchronize = planted  # type: ignore[method-assign]
    training.step(inputs)
    unchanged = all(torch.equal(before[name], value) for name, value in weights(training).items())
    unchanged &= all(
        torch.equal(old, new) for old, new in zip(masters, training.optimizer.masters, strict=True)
    )
    moments = [s["exp_avg"] for s in training.optimizer.adam.state.values()]
    no_moments = all(not m.any() for m in moments)
    first = float(training.optimizer.scale)
    training.backend.synchronize = synchronize  # type: ignore[method-assign]
    training.step(inputs)
    moved = any(not torch.equal(before[name], value) for name, value in weights(training).items())
    steps = {float(s["step"]) for s in training.optimizer.adam.state.values()}
    return {
        "unchanged": unchanged,
        "no_moments": no_moments,
        "scales": (first, float(training.optimizer.scale)),
        "moved": moved,
        "steps": steps,
    }


@pytest.mark.parametrize("gradients", ["contiguous", "stale"])
def test_overflow_on_one_rank_skips_the_step_on_all(pool: RankPool, gradients: str) -> None:
    for rank in pool.run({"tp": 3}, after_an_overflow, "tensor_parallel", gradients):
        assert rank["unchanged"]
        assert rank["no_moments"]
        assert rank["scales"] == (2.0**7, 2.0**7)  # halved, and kept by a good step
        assert rank["moved"]
        assert rank["steps"] == {1.0}  # the skipped step does not count for Adam's bias correction


@pytest.mark.parametrize(("precision", "bits"), [("fp16", 16), ("bf16", 16), ("fp32", 32), ("fp64", 64)])
def test_half_precision_is_updated_in_float32(precision: str, bits: int) -> None:
    training, _ = made(Strategy(), PRECISIONS[precision])
    optimizer = training.optimizer
    assert {p.dtype.itemsize * 8 for p in optimizer.parameters} == {bits}
    assert {master.dtype.itemsize * 8 for master in optimizer.masters} == {max(bits, 32)}
    assert (optimizer.masters[0] is optimizer.parameters[0]) is (bits >= 32)


def test_scale_grows_after_a_thousand_good_steps() -> None:
    training, inputs = made(Strategy(), PRECISIONS["fp16"])
    training.optimizer.scale.fill_(4.0)
    training.optimizer.since_growth.fill_(998)
    scales = []
    for _ in range(3):
        training.step(inputs)
        scales.append(float(training.optimizer.scale))
    assert scales == [4.0, 8.0, 8.0]


# -- initial weights ----------------------------------------------------------------------------------------


def initial(
    mesh: DeviceMesh, strategy: str, model: Model
) -> dict[str, tuple[Tensor, tuple[int, int, int] | None]]:
    module = model.build(strategy_class(strategy)(Place.on(mesh)), 24)
    initialize(module, 5, everything=True)
    named = {name: (p.detach(), shard_of(p)) for name, p in module.named_parameters()}
    return {name: (p, s and (s.dim, s.index, s.parts)) for name, (p, s) in named.items()}


@pytest.mark.parametrize("model", ["bert-tiny", "bert-tiny-linformer"])
@pytest.mark.parametrize("strategy", AXES)
def test_each_rank_starts_with_its_part_of_one_devices_weights(
    pool: RankPool, strategy: str, model: str
) -> None:
    preset = model_preset(model)
    (whole,) = pool.run({}, initial, "single", preset)
    ranks = pool.run({AXES[strategy]: 4}, initial, strategy, preset)
    cut = 0
    for name, (full, _) in whole.items():
        shards = {rank[name][1] for rank in ranks}
        if shards == {None}:
            assert all(torch.equal(rank[name][0], full) for rank in ranks)
        else:
            cut += 1
            (dim,) = {shard[0] for shard in shards if shard}
            assert [rank[name][1] for rank in ranks] == [(dim, i, 4) for i in range(4)]
            assert torch.equal(torch.cat([rank[name][0] for rank in ranks], dim), full)
    assert cut > 0 or (strategy, model) == ("ring_self_attention", "bert-tiny")
    matrices = [full for full, _ in whole.values() if full.ndim == 2]
    assert torch.cat([m.flatten() for m in matrices]).std().item() == pytest.approx(0.02, rel=0.02)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    model = model_preset("bert-tiny")
    modules = [model.build(Strategy(), 24) for _ in range(3)]
    torch.manual_seed(1)
    initialize(modules[0], 1)
    torch.manual_seed(2)
    initialize(modules[1], 1)
    initialize(modules[2], 2)
    first, same, other = (dict(m.named_parameters()) for m in modules)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["blocks.0.mlp_in.weight"], other["blocks.0.mlp_in.weight"])
    assert not torch.equal(first["blocks.0.mlp_in.weight"], first["blocks.1.mlp_in.weight"])
    assert not first["blocks.0.mlp_in.bias"].any()
    assert bool((first["blocks.0.mlp_end.norm.weight"] == 1).all())


# -- dropout ------------------------------------------------------------------------------------------------


def masks(seed: int, rank: int, axes: Sequence[str], step: int = 0, count: int = 3) -> list[Tensor]:
    random = DropoutRandom(seed, Place({"sp": 4}, {"sp": rank}))
    random.begin_step(step)
    return [random.mask(torch.empty(40, 50), 0.3, axes) for _ in range(count)]


def test_dropout_masks_agree_where_replicated_and_differ_where_sharded() -> None:
    for a, b in zip(masks(1, 0, ()), masks(1, 3, ()), strict=True):
        assert torch.equal(a, b)
    everything = [m for rank in range(4) for step in range(2) for m in masks(1, rank, ["sp"], step)]
    everything += masks(2, 0, ["sp"]) + masks(1, 0, ()) + masks(1, 0, (), 1)
    for i, a in enumerate(everything):
        for b in everything[:i]:
            # two independent masks agree in 0.7^2 + 0.3^2 of their places
            assert (a == b).double().mean().item() == pytest.approx(0.58, abs=0.05)
    kept = torch.stack(everything).double().mean().item()
    assert kept == pytest.approx(0.7, abs=0.01)


def test_masks_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    masks(1, 0, ["sp"])
    assert torch.equal(torch.rand(2), expected)


def test_dropout_keeps_the_mean() -> None:
    x = torch.ones(400, 500, requires_grad=True)
    y = DropoutRandom(0, 0).dropout(x, 0.25, ())
    assert y.detach().unique().tolist() == pytest.approx([0, 4 / 3])
    assert y.mean().item() == pytest.approx(1, abs=0.01)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert DropoutRandom(0, 0).dropout(x, 0, ()) is x
    assert torch.equal(masked_dropout(x, torch.ones_like(x, dtype=torch.bool), 0.5), 2 * x)


def gradients_with_dropout(mesh: DeviceMesh, strategy: str, checkpointing: bool) -> list[Tensor]:
    model = replace(model_preset("bert-tiny"), dropout=0.3, checkpointing=checkpointing)  # type: ignore[type-var]
    training, inputs = made(strategy_class(strategy)(Place.on(mesh)), PRECISIONS["fp64"], model)
    gradients: list[Tensor] = []
    for step in range(2):
        training.strategy.random.begin_step(step)
        training.backend.zero()
        training.module(inputs)["loss"].backward()
        gradients += [p.grad.clone() for p in training.module.parameters() if p.grad is not None]
    return gradients


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["single", *AXES])
def test_recomputation_repeats_the_masks(pool: RankPool, strategy: str) -> None:
    n = 1 if strategy == "single" else 2
    axis = AXES.get(strategy, "sp")
    kept, recomputed = (
        pool.run({axis: n}, gradients_with_dropout, strategy, checkpointing)
        for checkpointing in (False, True)
    )
    for a, b in zip(kept, recomputed, strict=True):
        assert len(a) == len(b) > 0
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        first, second = a[: len(a) // 2], a[len(a) // 2 :]
        assert not any(torch.equal(x, y) for x, y in zip(first, second, strict=True) if x.any())


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


COMPOSED = data(__file__)["COMPOSED"]


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
@tabled(__file__, "four_axes_on_sixteen_ranks")
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


@tabled(__file__, "planted_faults_are_seen")
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


def interleaved_cell(pp: int, virtual_stages: int, strategy: str = "single", **axes: int) -> Cell:
    interleaved = {"schedule": "interleaved", "virtual_stages": virtual_stages} if virtual_stages > 1 else {}
    fields = {"model_options": {"layers": 8, "vocabulary_multiple": 2}, "cluster": "dgx-a100"}
    training = {"micro_batches": 8, **interleaved}
    return make_cell(
        "bert-tiny", strategy, {"pp": pp, **axes}, 16, SEQ_LEN, "fp16", training=training, **fields
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
