"""Every data-parallel backend trains as one device does, sends what its closed form says, and holds less
than the one before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters, rank_classes
from spbench.bench.measure.engines.setup import build_training, rank_inputs, record_step
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.meter import Operation
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.verify.judged import relative_errors
from spbench.bench.measure.verify.verified_run import Case
from spbench.bench.measurement import Measurement
from spbench.impls.backends.backend import Backend, HeldPart
from spbench.impls.backends.buckets import FIRST_BUCKET_BYTES, BucketedGradients
from spbench.impls.backends.optimizer import PRECISIONS, default_dtype
from spbench.impls.collectives import all_reduce
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backends, strategy_class
from spbench.impls.strategies.base import Strategy, Unsupported, shard_of
from spbench.impls.training.step import Training, initialize
from tests.measure.verify import backend_faults as faults
from tests.measure.verify.assertions import assert_green
from tests.slow import mostly_slow, slow

LENGTH, STEPS = 24, 2
#: reordered sums make errors of 1e-14, a wrong factor or a missing part far more than this
LIMIT = 1e-10
set_weights = partial(initialize, seed=5, deviation=0.2, everything=True)


def cell(backend: str, strategy: str = "lasp", micro_batches: int = 1, **changed: Any) -> Cell:
    settings = {
        "model": "tnl-tiny" if strategy == "lasp" else "bert-tiny",
        "strategy": strategy,
        "batch": 12,
        "seq_len": LENGTH,
        "precision": "fp64",
        "training": {"backend": backend, "micro_batches": micro_batches},
    }
    return Cell.model_validate(settings | changed)


# -- values -----------------------------------------------------------------------------------------------


def reference_step(
    reference: Training, batch: dict[str, Tensor], largest: float
) -> tuple[dict[str, Tensor], Tensor]:
    """A step of one device with gradients clipped to a norm, unless that is 0; returns them before it was,
    and their norm."""
    reference.gradients(batch)
    parameters = dict(reference.module.named_parameters())
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(parameters.values(), largest or float("inf"))
    reference.backend.step()
    return gradients, norm


def errors_of_rank(
    mesh: DeviceMesh,
    asked: Cell,
    cls: type[Backend],
    updated: Callable[[Training], None] = lambda reference: None,
) -> dict[str, float]:
    """Relative errors of what this rank holds of each step's gradients and updated weights, from those of
    one device, whose optimizer ``updated`` may change."""
    model = model_preset(asked.model, asked.model_options)
    with default_dtype(torch.float64):
        whole = model.build(Strategy(), LENGTH)
    set_weights(whole)
    reference = Training(whole, Strategy(), PRECISIONS["fp64"])
    updated(reference)
    shards = {}

    def noted(module: Any) -> None:
        set_weights(module)
        shards.update({name: (shard_of(p), p.shape) for name, p in module.named_parameters()})

    with mock.patch("spbench.impls.training.step.backend_class", return_value=cls):
        training, strategy, around = build_training(asked, mesh, noted)
    gradients: dict[str, Tensor] = {}
    places: dict[str, HeldPart] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        if name == "optimizer":
            parts = training.backend.gradient_parts()
            gradients.update({n: part.values.clone() for n, part in parts.items()})
            places.update(training.backend.gradient_places())
        yield

    errors: dict[str, float] = {}
    for step in range(STEPS):
        batch = model.inputs(12, LENGTH, torch.Generator().manual_seed(step))
        batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        for each in (reference, training):
            each.optimizer.set_learning_rate(0.01)
        whole_gradients, norm = reference_step(
            reference, batch, getattr(training.backend.options, "clip_grad", 0)
        )
        training.step(rank_inputs(model, strategy, around, batch), phase)
        if training.backend.gradient_norm is not None:
            name = f"norm {step} of all"
            errors |= relative_errors({name: norm}, {name: training.backend.gradient_norm})
        parts, truth = training.backend.weight_parts(), dict(whole.named_parameters())

        def mine(name: str, x: Tensor | None, parts: Any = parts) -> Tensor:
            assert x is not None
            shard, _ = shards[name]
            of_strategy: Tensor = parts[name].of(shard.of(x) if shard else x)
            return of_strategy.flatten()

        held = {name: part.values.flatten() for name, part in parts.items()}
        expected = {name: mine(name, truth[name].detach()) for name in parts}
        errors |= {f"weight {step} {name}": e for name, e in relative_errors(expected, held).items()}
        expected = {name: mine(name, whole_gradients[name], places) for name in places}
        held = {name: x.flatten() for name, x in gradients.items()}
        errors |= {f"gradient {step} {name}": e for name, e in relative_errors(expected, held).items()}
    # all parts of all ranks must make each whole, or else equal parts would show little
    for name, p in truth.items():
        count = torch.zeros_like(p, dtype=torch.int64)
        if name in parts:
            shard, shape = shards[name]
            held = torch.zeros(shape, dtype=torch.int64)
            parts[name].of(held).add_(1)
            (shard.of(count) if shard else count).add_(held)
        all_reduce(count, around.place.group("dp", *strategy.nested_axes))
        somewhere = 1 if around.stage.count == 1 else 0  # other stages have others
        errors[f"elements {name}"] = 0.0 if count.min() == count.max() >= somewhere else float("inf")
    return errors


SIZES: list[tuple[str, dict[str, int], int]] = [
    ("lasp", {"sp": 2, "dp": 2}, 2),  # another order of the mesh
    ("single", {"dp": 3}, 2),  # uneven shards
    ("lasp", {"sp": 2, "dp": 2}, 1),
    ("single", {"dp": 3}, 1),
    ("tensor_parallel", {"dp": 2, "tp": 2}, 2),
    ("single", {}, 2),
    ("lasp", {"sp": 2}, 1),
    ("lasp", {"dp": 2, "sp": 2}, 1),
]


def trained() -> Iterator[Any]:
    """Backends and sizes, by default one of the first two."""
    for number, backend in enumerate(backends()):
        for place, (strategy, sizes, micro_batches) in enumerate(SIZES):
            mesh = "x".join(f"{axis}{n}" for axis, n in sizes.items())
            yield pytest.param(
                cell(backend, strategy, micro_batches, sizes=sizes, mesh=[*sizes]),
                id=f"{backend}-{strategy}-{mesh}-{micro_batches}",
                marks=() if place == number % 2 else pytest.mark.slow,
            )


def assert_right(pool: RankPool, asked: Cell, cls: type[Backend]) -> None:
    for errors in pool.run(asked.mesh_sizes, errors_of_rank, asked, cls):
        assert max(errors.values()) < LIMIT, max(errors, key=errors.__getitem__)


def assert_first_wrong(pool: RankPool, asked: Cell, fault: type[Backend], where: str) -> None:
    """The fault first shows ``where`` it was planted: what was computed before that is right."""
    for errors in pool.run(asked.mesh_sizes, errors_of_rank, asked, fault):
        wrong = {name.rsplit(" ", 1)[0] for name, error in errors.items() if error > LIMIT}
        in_order = [f"{what} {step}" for step in range(STEPS) for what in ("gradient", "weight")]
        assert next(name for name in in_order if name in wrong) == where
        assert max(error for name, error in errors.items() if name.startswith(where)) > 1e-3
        assert not any(name.startswith("elements") for name in wrong)


@pytest.mark.parametrize("asked", [*trained()])
def test_gradients_and_updates_are_those_of_one_device(pool: RankPool, asked: Cell) -> None:
    assert_right(pool, asked, backends()[asked.training.backend])


@pytest.mark.parametrize("backend", [name for name, cls in backends().items() if cls.pipelined])
def test_in_pipeline_stages(pool: RankPool, backend: str) -> None:
    assert_right(pool, cell(backend, "single", 2, sizes={"dp": 2, "pp": 2}), backends()[backend])


@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("zero3", {"schedule": "1f1b", "micro_batches": 3}),
        ("zero2", {"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 6}),
        slow("zero2", {"schedule": "1f1b", "micro_batches": 3}),
        slow("zero3", {"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 6}),
        slow("zero3", {"schedule": "gpipe", "micro_batches": 3}),
    ],
)
def test_sharded_stages_gather_and_sum_when_torch_does(
    pool: RankPool, backend: str, schedule: dict[str, Any]
) -> None:
    training = {"backend": backend, **schedule}
    asked = cell(backend, "single", sizes={"dp": 2, "pp": 2}, training=training, model_options={"layers": 4})
    assert_right(pool, asked, backends()[backend])
    assert_sends_its_closed_form(pool, asked.model_copy(update={"precision": "fp16"}))


HYBRID = {"backend": "zero3", "data_parallel_replicate_degree": 2, "micro_batches": 2}


@pytest.mark.parametrize(
    ("strategy", "sizes", "training"),
    [
        ("lasp", {"dp": 2, "sp": 2}, HYBRID),
        slow("single", {"dp": 4}, {**HYBRID, "micro_batches": 3}),
        slow("single", {"dp": 4}, {**HYBRID, "backend": "zero2", "micro_batches": 1}),
        slow("single", {"dp": 4}, {**HYBRID, "wrap": "whole", "micro_batches": 1}),
    ],
)
def test_groups_of_ranks_share_a_copy_each(
    pool: RankPool, strategy: str, sizes: dict[str, int], training: dict[str, Any]
) -> None:
    asked = cell(training["backend"], strategy, sizes=sizes, training=training)
    assert_right(pool, asked, backends()[asked.training.backend])
    assert_sends_its_closed_form(pool, asked.model_copy(update={"precision": "fp16"}))


def test_groups_that_do_not_divide_the_ranks() -> None:
    for groups in (3, 4):
        training = {**HYBRID, "data_parallel_replicate_degree": groups, "micro_batches": 1}
        with pytest.raises(Unsupported, match=f"replicate_degree {groups} does not cut 4 ranks"):
            VirtualEngine().measure(cell("zero3", "single", sizes={"dp": 4}, training=training))


@pytest.mark.parametrize("backend", [name for name, cls in backends().items() if not cls.pipelined])
def test_whole_models_only(backend: str) -> None:
    with pytest.raises(Unsupported, match=f"the backend {backend} .* no pipeline stages; use pp 1"):
        VirtualEngine().measure(cell(backend, "single", 2, sizes={"pp": 2}))


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (faults.ReplicasNotSummed, "gradient 0"),
        (faults.WeightsNotGathered, "weight 0"),
        (faults.UpdatesTheNextShard, "weight 0"),
        (faults.FlatGradientNotSummed, "gradient 0"),
        (faults.GradientNotSummed, "gradient 0"),
        (faults.MeanOverRanks, "gradient 0"),
        (faults.WeightsNotGatheredAnew, "gradient 1"),
    ],
)
def test_planted_faults_are_seen(pool: RankPool, fault: type[Backend], where: str) -> None:
    assert_first_wrong(pool, cell(fault.name, sizes={"dp": 2}), fault, where)


@pytest.mark.parametrize("n", mostly_slow((1, 3, 4), 4))
@pytest.mark.parametrize(
    "backend", mostly_slow(sorted({*backends()} - {"legacy_ddp"}), "megatron", "zero3", "fsdp_flat")
)
def test_the_checker_is_green(pool: RankPool, backend: str, n: int) -> None:
    for strategy, model in (("lasp", "tnl-tiny"), ("ulysses", "causal-transformer-tiny")):
        case = Case(strategy_class(strategy), model_preset(model), "model", seq_len=LENGTH, backend=backend)
        assert_green(pool, case, n)


# -- bytes sent and held ----------------------------------------------------------------------------------


def seen(trace: Trace) -> tuple[Counter[Operation], list[dict[str, Any]]]:
    """What a rank sent, and where that differs from the closed form."""
    counts = trace.communication.counts
    return counts, [entry | {"rank": None} for entry in trace.measurement(None).formula_difference]


def on_a_real_rank(mesh: DeviceMesh, asked: Cell) -> Any:
    recorder = Recorder(mesh)
    with recorder:
        record_step(asked, mesh, recorder, torch.Generator().manual_seed(0), partial(initialize, seed=1))
    return seen(Trace.of(asked, dist.get_rank(), recorder))


def assert_sends_its_closed_form(pool: RankPool, asked: Cell) -> None:
    """On real ranks, and on the virtual rank that stands for each of them."""
    really = pool.run(asked.mesh_sizes, on_a_real_rank, asked)
    assert all(counts and not difference for counts, difference in really)
    for each in rank_classes(asked):
        virtually = seen(tracing.trace(asked, each.first))
        assert [really[rank] for rank in each.ranks] == [virtually] * len(each.ranks)


#: of these the default run compares this in test_megatron.py, and in tests.measure.engines.test_peaks
ELSEWHERE = {"megatron", "zero3", "fsdp_flat"}


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [({"sp": 2, "dp": 2}, "fp16"), slow({"dp": 2, "sp": 2}, "fp16"), slow({"dp": 3}, "fp32")],
    ids=["sp2xdp2-fp16", "dp2xsp2-fp16", "dp3-fp32"],
)
@pytest.mark.parametrize("backend", mostly_slow(backends(), *({*backends()} - ELSEWHERE)))
def test_closed_form_virtual_and_real_ranks_send_the_same(
    pool: RankPool, backend: str, sizes: dict[str, int], precision: str
) -> None:
    assert_sends_its_closed_form(
        pool, cell(backend, "lasp", 2, sizes=sizes, mesh=[*sizes], precision=precision)
    )


#: most of its memory is weights and what belongs to them
HEAVY = {"layers": 4, "hidden": 192, "inner": 512, "vocabulary": 1024}


def heavy(backend: str, n: int) -> Cell:
    return cell(backend, batch=n, sizes={"dp": n}, precision="fp16", model_options=HEAVY)


@cache
def heavy_run(backend: str, n: int) -> Measurement:
    return VirtualEngine().measure(heavy(backend, n))


def test_each_stage_of_zero_holds_less() -> None:
    peaks = {name: heavy_run(name, 8).peak_memory_bytes or 0 for name in backends()}
    assert peaks["zero3"] < peaks["zero2"] < peaks["zero1"] < peaks["ddp"], peaks


#: bytes a parameter of weights and of optimizer state, in fp16 on n ranks: half weights 2, float32 weights 4,
#: moments 8, float32 gradients where they are kept 4
HELD: dict[str, Callable[[int], tuple[float, float]]] = {
    "legacy_ddp": lambda n: (2, 4 + 8),
    "ddp": lambda n: (2, 4 + 8 + 4),
    "zero1": lambda n: (2, (4 + 8 + 4) / n),
    "zero2": lambda n: (4 / n, 8 / n),
    "zero3": lambda n: (4 / n, 8 / n),
    "megatron": lambda n: (2, 4 + 8),
    "fsdp_flat": lambda n: (0, (4 + 8) / n),
    "fsdp1": lambda n: (0, (4 + 8) / n),
}


@pytest.mark.parametrize("n", mostly_slow((2, 8), 8))
@pytest.mark.parametrize("backend", backends())
def test_what_is_held_between_steps(backend: str, n: int) -> None:
    at_peak, elements = heavy_run(backend, n).peak_held, model_parameters(heavy(backend, n))
    weights, state = HELD[backend](n)
    # small tensors and padding take more than their share
    assert at_peak["parameters"] == pytest.approx(weights * elements, rel=0.02)
    assert at_peak["optimizer_state"] == pytest.approx(state * elements, rel=0.02)


def test_a_bucket_is_sent_as_soon_as_it_is_full() -> None:
    full, last = (nn.Parameter(torch.empty(FIRST_BUCKET_BYTES // 4, device="meta")) for _ in range(2))
    buckets = BucketedGradients([(None, [last, full])], [last, full]).buckets
    assert [bucket.parameters for bucket in buckets] == [[full], [last]]


def test_outputs_are_freed_where_the_library_does() -> None:
    """Megatron-LM's deallocate_pipeline_outputs."""
    assert [name for name, cls in backends().items() if cls.frees_sent_outputs] == ["megatron"]
