"""Verification of the model of a config.json, in sizes that float64 on a few ranks can take.

Dropout keeps what all ranks of tensor parallelism hold alike. In a file of its own, which ranks import.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tests.impls.models.huggingface as published
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import verify_cases
from spbench.impls.backends.legacy_ddp import ContiguousGradients
from spbench.impls.models.bert import BertModel
from spbench.impls.place import Place
from spbench.impls.registries import all_models
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.training.step import initialize
from tests.grid import tabled

FOLDER = Path(published.__file__).parent


@pytest.mark.one_in(4)
@tabled(__file__, "green")
def test_green(pool: RankPool, name: str, strategy: str) -> None:
    path = name if name in all_models() else str(FOLDER / f"{name}.json")
    row = next(verify_cases([strategy], [path], (4,), parts=["attention"], pool=pool))
    assert row.model == path
    assert row.status == "green", row.reason


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_family_under_every_way_to_cut_it(pool: RankPool, path: Path) -> None:
    strategies = ["tensor_parallel", "megatron_sp", "ulysses", "ring_attention", "ring_self_attention"]
    rows = [*verify_cases(strategies, [str(path)], (3, 4), pool=pool)]
    assert {row.status for row in rows} == {"green", "unsupported"}
    assert sum(row.status == "green" for row in rows) >= 20


def replicas_after_a_step_with_dropout(mesh: DeviceMesh, model: BertModel) -> float:
    """Largest difference over ranks of the hidden states and of gradients of what all ranks hold."""
    strategy = TensorParallel(Place.on(mesh), seed=3)
    module = model.build(strategy, 24)
    initialize(module, 0, deviation=0.2, everything=True)
    gradients = ContiguousGradients(module, strategy)
    strategy.random.begin_step(7)
    outputs = module(model.inputs(3, 24, torch.Generator().manual_seed(0)))
    outputs["loss"].backward()
    gradients.synchronize()
    held = [outputs["hidden"].detach(), module.embeddings.positions.weight.grad]
    held += [block.mlp_end.bias.grad for block in module.blocks.values()]
    flat = torch.cat([x.flatten() for x in held])
    top, bottom = flat.clone(), flat.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    dist.all_reduce(bottom, dist.ReduceOp.MIN)
    return (top - bottom).abs().max().item()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_keeps_the_replicas_of_tensor_parallelism_alike(pool: RankPool, checkpointing: bool) -> None:
    model = replace(all_models()["bert-tiny"], dropout=0.3, checkpointing=checkpointing)
    spread = pool.run({"tp": 4}, replicas_after_a_step_with_dropout, model)
    assert max(spread) == 0  # all-reduced sums are the same bits on all ranks
