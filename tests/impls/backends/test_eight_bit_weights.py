"""Weights that Megatron's buffers keep and gather in eight bits: values, faults, bytes sent and held. AdamW
with moments in another precision than the weights, against torch's.
Muon in the backend `megatron`: torch's own on 1 to 4 ranks, who updates which matrix, what is sent."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.setup import build_training, rank_inputs
from spbench.bench.measure.engines.virtual import VirtualEngine, trace_classes
from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends import main_weights
from spbench.impls.backends.buffer_layout import Sharding
from spbench.impls.backends.main_gradients import GradientBucket
from spbench.impls.backends.megatron import Megatron
from spbench.impls.backends.muon import (
    DECAY,
    MOMENTUM,
    Matrix,
    Muon,
    dealt,
    is_matrix,
    orthogonalised,
    packed,
)
from spbench.impls.backends.optimizer import PRECISIONS, NarrowMoments
from spbench.impls.kernels.fp8_casts import E4M3
from spbench.impls.layout import stacks_experts
from spbench.impls.registries import model_preset
from spbench.impls.training.step import Training
from tests.cells import make_cell
from tests.grid import tabled
from tests.impls.backends.one_device import (
    LIMIT,
    errors_of_rank,
    set_weights,
    trained,
)
from tests.impls.models.test_recomputation import kernels, trace

MODEL = {"fp8": "tensorwise", "library": "transformer-engine", "layers": 2}
GATHERED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 700}


def asked(kept: bool, precision: str = "fp64", **changed: Any) -> Cell:
    gathered = {**GATHERED, "overlap_param_gather": True, "fp8_param_gather": kept}
    training = {"backend": "megatron", "micro_batches": 2, **gathered}
    fields = {"model_options": MODEL, "training": training, **changed}
    return make_cell("causal-transformer-tiny", "single", {"dp": 2}, 4, 16, precision, **fields)


def stepped(mesh: DeviceMesh, cell: Cell) -> dict[str, Tensor]:
    """This rank's losses of two steps, then its parts of the main weights and of what weights count as."""
    training, strategy, around = build_training(cell, mesh, set_weights)
    model, results = model_preset(cell.model, cell.model_options), dict[str, Tensor]()
    for step in range(2):
        batch = model.inputs(cell.batch, cell.seq_len, torch.Generator().manual_seed(step))
        batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        training.optimizer.set_learning_rate(0.01)
        results[f"loss {step}"] = training.step(rank_inputs(model, strategy, around, batch))
    backend = training.backend
    for main in backend.mains:  # type: ignore[attr-defined]
        name, own = backend.names[main.parameter], main.elements
        for kind, values in (("main", main.values), ("weight", main.counts_as)):
            results[f"{kind} {name}"] = values.new_zeros(main.parameter.numel())
            results[f"{kind} {name}"][own] = values
    dtypes = {p.dtype for p in backend.names}
    assert (E4M3 in dtypes) == bool(cell.training.backend_options.get("fp8_param_gather"))
    return results


def summed(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Results of all ranks, each of which has zeros in the place of others' parts."""
    names = {name for each in results for name in each}
    return {name: torch.stack([each[name] for each in results if name in each]).sum(0) for name in names}


def farthest(**changed: Any) -> dict[str, float]:
    """How far results with weights kept in eight bits are from those with weights cast in each step, as a
    share of the largest magnitude, by the first word of their names."""
    kept, cast = (
        summed(LockstepRanks().run({"dp": 2}, stepped, asked(each, **changed))) for each in (True, False)
    )
    shares: dict[str, float] = {}
    for name, x in cast.items():
        kind, share = name.split()[0], ((kept[name] - x).abs().max() / x.abs().max()).item()
        shares[kind] = max(shares.get(kind, 0.0), share)
    return shares


def test_steps_are_those_of_weights_that_are_cast_each_step() -> None:
    """Both have the same main weights in float64, so that the same casts multiply."""
    shares = farthest()
    assert max(shares["loss"], shares["main"]) < 1e-12
    assert 1e-3 < shares["weight"] < 2.0**-4  # what is kept is rounded


def test_weights_that_are_cast_by_delayed_scales_are_near_the_main_weights() -> None:
    cell = asked(True, model_options={**MODEL, "fp8": "delayed"})
    results = summed(LockstepRanks().run({"dp": 2}, stepped, cell))
    names = [name.removeprefix("main ") for name in results if name.startswith("main blocks")]
    assert names
    for name in names:
        main, weight = results[f"main {name}"], results[f"weight {name}"]
        assert (weight - main).abs().max() <= 2.0**-4 * main.abs().max()


@pytest.mark.parametrize(
    "fault",
    [
        mock.patch.object(main_weights, "all_reduce", lambda x, *_: x),
        mock.patch.object(GradientBucket, "gather", return_value=None),
    ],
)
def test_a_scale_of_one_rank_and_parts_that_are_not_gathered_are_seen(fault: Any) -> None:
    with fault:
        assert farthest()["loss"] > 1e-6


@tabled(__file__, "bytes_sent_are_those_of_the_closed_form")
def test_bytes_sent_are_those_of_the_closed_form(
    strategy: str, sizes: dict[str, int], late: bool, fp8: str
) -> None:
    training = {
        "backend": "megatron",
        "micro_batches": 2,
        **GATHERED,
        "overlap_param_gather": late,
        "fp8_param_gather": True,
    }
    setting = {"strategy": strategy, "sizes": sizes, "batch": 8, "precision": "bf16", "training": training}
    traced = trace(model_options={**MODEL, "fp8": fp8}, **setting)
    measured = traced.measurement(None)
    assert measured.formula_difference == []
    assert any(row["purpose"] == "largest of weights" for row in measured.formula)


def test_a_weight_is_a_byte_an_element_and_its_transpose_another_where_matmuls_need_it() -> None:
    def parameters(kept: bool, **options: Any) -> tuple[int, int]:
        training = {"backend": "megatron", "distributed_optimizer": True, "fp8_param_gather": kept}
        model = {**MODEL, "hidden": 256, "heads": 4, "inner": 512, **options}
        cell = {"model_options": model, "sizes": {"dp": 2}, "batch": 2}
        traced = trace(**cell, precision="bf16", training=training)
        held = trace_classes(asked(False, "bf16", **cell, training=training)).by_class[0].by_class[-1]
        return held["allocated_bytes"], kernels(traced)["fp8_transpose"]

    weights = 2 * (4 * 256**2 + 3 * 256 * 512)
    cast, kept = parameters(False), parameters(True)
    both = parameters(True, fp8_transposes=False)
    assert cast[0] - kept[0] == pytest.approx(2 * weights, rel=0.02)  # 2 + 1 + 1 bytes, or 1 + 1
    assert kept[0] - both[0] == pytest.approx(weights, rel=0.02)
    assert (cast[1], kept[1], both[1]) == (0, 8, 0)


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (7,))]


def stepped_twice(adam: NarrowMoments | torch.optim.AdamW, held: list[Tensor]) -> list[Tensor]:
    for step in range(4):
        for x in held:
            x.grad = (x.detach() + step).sin()
        (adam.update if isinstance(adam, NarrowMoments) else adam.step)()
    return held


@pytest.mark.parametrize("kept", [False, True])
def test_updates_are_those_of_torchs_adamw(kept: bool) -> None:
    """In float64, where nothing is rounded; with moments that are there before the first step too."""
    ours, theirs = weights(), [x.requires_grad_() for x in weights()]
    adam = NarrowMoments(ours, PRECISIONS["fp64"], torch.float64, with_moments=kept, lr=0.01)
    expected = stepped_twice(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.01), theirs)
    torch.testing.assert_close(
        stepped_twice(adam, ours), [x.detach() for x in expected], rtol=1e-13, atol=1e-15
    )


def test_moments_have_two_bytes_and_are_rounded() -> None:
    ours, exact = weights(), weights()
    adam = NarrowMoments(ours, PRECISIONS["fp64"], torch.bfloat16, with_moments=False, lr=0.01)
    stepped_twice(NarrowMoments(exact, PRECISIONS["fp64"], torch.float64, with_moments=False, lr=0.01), exact)
    stepped_twice(adam, ours)
    assert [x.dtype for x in adam.tensors()] == [torch.bfloat16] * 4
    change = torch.cat([(a - b).flatten() for a, b in zip(ours, exact, strict=True)]).abs().max()
    assert 1e-6 < change < 1e-3  # of steps of 0.01 each


def test_moments_are_narrow_on_weights_in_bf16_alone() -> None:
    training = {"backend": "megatron", "exp_avg_dtype": "bf16"}
    asked = {"model": "gpt3-tiny", "strategy": "single", "batch": 1, "seq_len": 8, "training": training}
    cells = [
        Cell.model_validate({**asked, "precision": "bf16", "training": {**training, "exp_avg_dtype": dtype}})
        for dtype in ("bf16", "fp32")
    ]
    narrow, wide = (VirtualEngine().measure(cell).peak_held["optimizer_state"] for cell in cells)
    assert narrow / wide == pytest.approx((4 + 2 + 2) / (4 + 4 + 4), rel=0.02)  # a weight and its moments
    with pytest.raises(ValueError, match="exp_avg_dtype: bf16 needs precision: bf16"):
        Cell.model_validate({**asked, "precision": "fp32"})


MUON = {"update": "muon"}
DEALT = {**MUON, "distributed_optimizer": True, "layer_wise_layout": False}
#: the steps of torch.optim.Muon
SIMPLE = (3.4445, -4.7750, 2.0315)


class LikeTorch(Megatron):
    """With the coefficients of torch.optim.Muon."""

    muon_coefficients = (SIMPLE,)


class GathersNoMoments(LikeTorch):
    """Orthogonalises a rank's part of each matrix."""

    def _muon(self, *args: Any) -> Muon:
        muon = super()._muon(*args)
        muon.matrices = [Matrix(m.values, m.shape) for m in muon.matrices]
        return muon


class SpreadsNothing(LikeTorch):
    """Keeps what a rank has updated to itself."""

    def step(self) -> None:
        self.dealt = []
        super().step()


def by_torch(reference: Training) -> None:
    """Let torch.optim.Muon update a reference's matrices, in float64, and AdamW the rest."""
    names = dict(reference.module.named_parameters())
    matrices = {name: p for name, p in names.items() if is_matrix(name, p)}
    others = [p for name, p in names.items() if name not in matrices]

    def flat_of(x: Tensor, p: Tensor) -> list[Tensor]:
        """The matrices of x, a weight p or its gradient; one that stacks experts has several."""
        return [each.flatten(0, -2) for each in (x if stacks_experts(p) else [x])]

    flat = {n: [torch.nn.Parameter(x) for x in flat_of(p.detach(), p)] for n, p in matrices.items()}
    muon = torch.optim.Muon(
        [x for each in flat.values() for x in each],
        weight_decay=DECAY,
        momentum=MOMENTUM,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
        eps=1e-15,
    )
    adam = torch.optim.AdamW(others, weight_decay=0.01)

    def step() -> None:
        for name, p in matrices.items():
            for x, values, gradient in zip(flat[name], flat_of(p.data, p), flat_of(p.grad, p), strict=True):
                x.data, x.grad = values, gradient
        for group in (*muon.param_groups, *adam.param_groups):
            group["lr"] = 0.01
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            muon.step()
        adam.step()
        for name, p in matrices.items():
            p.data.copy_(torch.stack([x.detach() for x in flat[name]]).view(p.shape))

    reference.optimizer.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "options", "strategy", "sizes"),
    [
        (GathersNoMoments, MUON, "tensor_parallel", {"tp": 2}),
        (SpreadsNothing, DEALT, "single", {"dp": 2}),
        (Megatron, MUON, "single", {}),  # other coefficients
    ],
)
def test_planted_faults_are_seen(
    pool: RankPool, fault: type[Megatron], options: dict[str, Any], strategy: str, sizes: dict[str, int]
) -> None:
    one = trained("megatron", strategy, sizes, 2, options)
    for errors in pool.run(one.mesh_sizes, errors_of_rank, one, fault, by_torch):
        wrong = {name.rsplit(" ", 1)[0] for name, error in errors.items() if error > LIMIT}
        assert "gradient 0" not in wrong
        assert wrong & {"weight 0", "gradient 1"}


def test_singular_values_are_brought_near_one() -> None:
    for shape in ((24, 10), (10, 24), (12, 12)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        values = torch.linalg.svdvals(orthogonalised(x, 5))
        assert values.min() > 0.6
        assert values.max() < 1.3
        assert orthogonalised(x.float(), 5).dtype == torch.float32


def test_weights_are_dealt_there_and_back() -> None:
    assert dealt([5, 1, 2, 3, 4, 9, 7], 3) == [1, 0, 1, 2, 2, 0, 0]
    assert dealt([8, 8], 1) == [0, 0]


def test_packed_buckets_cut_no_matrix() -> None:
    shapes = [torch.Size(s) for s in ((64, 48), (3, 16, 48), (48, 64), (512, 48), (48, 48), (7, 48))]
    for ranks in (1, 2, 3, 8):
        for full_at in (None, 4000):
            buckets = packed(shapes, full_at, Sharding(ranks))
            assert sorted(i for bucket in buckets for i in bucket.members) == [*range(len(shapes))]
            assert (len(buckets) > 1) == (full_at is not None and ranks == 1)
            for bucket in buckets:
                assert (bucket.end - bucket.start) % ranks == 0
                each = (bucket.end - bucket.start) // ranks
                for i, start in zip(bucket.members, bucket.starts, strict=True):
                    first = start - bucket.start
                    assert first // each == (first + shapes[i].numel() - 1) // each


def test_moments_of_matrices_take_four_bytes() -> None:
    x, y = torch.ones(12, requires_grad=True), torch.ones(3, requires_grad=True)
    settings: dict[str, Any] = {"with_moments": True, "steps": 5}
    muon = Muon([Matrix(x, torch.Size((3, 4)))], [y], PRECISIONS["bf16"], **settings)
    assert sorted(t.numel() for t in muon.tensors()) == [1, 3, 3, 12]
