"""Muon in the backend `megatron`: torch's own on 1 to 4 ranks, who updates which matrix, what is sent."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends.buffer_layout import Sharding
from spbench.impls.backends.megatron import Megatron
from spbench.impls.backends.megatron_options import MegatronOptions
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
from spbench.impls.backends.optimizer import PRECISIONS
from spbench.impls.layout import stacks_experts
from spbench.impls.training.step import Training
from tests.impls.backends.one_device import LIMIT, assert_sends_its_closed_form, cell, errors_of_rank
from tests.impls.backends.test_experts import with_experts
from tests.slow import slow

MUON = {"update": "muon"}
PACKED = {**MUON, "distributed_optimizer": True}
DEALT = {**PACKED, "layer_wise_layout": False}
BUCKETS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 700}
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


def asked(options: dict[str, Any], strategy: str, sizes: dict[str, int], **changed: Any) -> Cell:
    if "ep" in sizes:
        changed.setdefault("model_options", {"stacked_experts": "etp" in sizes})
        return with_experts({"backend": "megatron", **options}, strategy, sizes, 2, **changed)
    training = {"backend": "megatron", "micro_batches": 2, **options}
    return cell("megatron", strategy, sizes=sizes, mesh=[*sizes], **{"training": training, **changed})


CASES: list[Any] = [
    (MUON, "tensor_parallel", {"dp": 2, "tp": 2}),
    slow(MUON, "single", {}),
    slow(PACKED, "single", {"dp": 3}),
    (DEALT, "ulysses", {"dp": 2, "sp": 2, "ep": 2}),
    slow(MUON, "single", {"dp": 2}),
    slow({**PACKED, **BUCKETS}, "single", {"dp": 4}),
    slow({**PACKED, **BUCKETS}, "tensor_parallel", {"dp": 2, "tp": 2}),
    slow({**PACKED, **BUCKETS}, "single", {"dp": 2, "pp": 2}),
    slow(PACKED, "ulysses", {"dp": 2, "sp": 2, "ep": 2}),
    slow(PACKED, "megatron_sp", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
    slow(DEALT, "single", {"dp": 3}),
    slow(DEALT, "megatron_sp", {"dp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("options", "strategy", "sizes"), CASES)
def test_updates_are_those_of_torchs_muon(
    pool: RankPool, options: dict[str, Any], strategy: str, sizes: dict[str, int]
) -> None:
    one = asked(options, strategy, sizes)
    for errors in pool.run(one.mesh_sizes, errors_of_rank, one, LikeTorch, by_torch):
        assert max(errors.values()) < LIMIT, max(errors, key=errors.__getitem__)


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
    one = asked(options, strategy, sizes)
    for errors in pool.run(one.mesh_sizes, errors_of_rank, one, fault, by_torch):
        wrong = {name.rsplit(" ", 1)[0] for name, error in errors.items() if error > LIMIT}
        assert "gradient 0" not in wrong
        assert wrong & {"weight 0", "gradient 1"}


@pytest.mark.parametrize(
    ("options", "strategy", "sizes"),
    [
        (DEALT, "single", {"dp": 3}),
        slow(MUON, "tensor_parallel", {"dp": 2, "tp": 2}),
        slow({**PACKED, **BUCKETS}, "tensor_parallel", {"dp": 2, "tp": 2}),
        slow(DEALT, "ulysses", {"dp": 2, "sp": 2, "ep": 2}),
        slow({**MUON, "muon_tp_mode": "blockwise"}, "megatron_sp", {"dp": 2, "tp": 2}),
    ],
)
def test_closed_form_virtual_and_real_ranks_send_the_same(
    pool: RankPool, options: dict[str, Any], strategy: str, sizes: dict[str, int]
) -> None:
    even = {"model_options": {"routing": "even"}} if "ep" in sizes else {}
    assert_sends_its_closed_form(pool, asked(options, strategy, sizes, precision="bf16", **even))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"muon_steps": 3}, "muon_steps needs update: muon"),
        ({"update": "muon", "muon_steps": 0}, "muon_steps is a number of steps from 1 on, not 0"),
        ({"update": "muon", "layer_wise_layout": False}, "needs distributed_optimizer"),
        ({**PACKED, "optimizer": "host"}, "update: muon has no optimizer: host"),
        ({**PACKED, "num_distributed_optimizer_instances": 2}, "has no num_distributed_optimizer_instances"),
    ],
)
def test_what_cannot_be_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronOptions(**options)
