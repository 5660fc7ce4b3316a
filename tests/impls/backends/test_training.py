"""Ranks train as one device does, and send what the closed form says, with every backend and option of
training.yaml."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends.backend import Backend
from spbench.impls.registries import all_backends
from tests.grid import cases
from tests.impls.backends.one_device import as_it_is, assert_first_wrong, assert_right, trained
from tests.impls.backends.test_eight_bit_weights import LikeTorch, by_torch
from tests.measure.engines.real_ranks import assert_real_ranks_are_as_virtual_ones
from tests.measure.verify import backend_faults as faults

CASES = cases(Path(__file__).with_name("training.yaml"))


@pytest.mark.parametrize("fields", CASES)
def test_ranks_train_as_one_device_does(pool: RankPool, fields: dict[str, Any]) -> None:
    sent = fields.pop("sent", None)
    asked = trained(**fields)
    muon = asked.training.backend_options.get("update") == "muon"
    cls, updated = (LikeTorch, by_torch) if muon else (all_backends()[asked.training.backend], as_it_is)
    assert_right(pool, asked, cls, updated)
    if sent:
        # fake tokens are routed to no experts of their own, but for even routing
        even = {"routing": "even"} if asked.model == "moe-tiny" else {}
        changed = {"precision": sent, "model_options": {**asked.model_options, **even}}
        assert_real_ranks_are_as_virtual_ones(pool, asked.model_copy(update=changed))


DISTRIBUTED, ON_HOST = {"distributed_optimizer": True}, {"optimizer": "host"}
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 700}
GATHERED_LATE = {**DISTRIBUTED, **BUCKETS, "overlap_param_gather": True}
INSTANCES = {**GATHERED_LATE, "num_distributed_optimizer_instances": 2}
PARAMETERS = {**ON_HOST, "parameters": "host"}
TWO, REPLICAS, STAGES = {"dp": 2}, {"dp": 2, "sp": 2}, {"dp": 2, "pp": 2}
#: a fault in a backend, the cell that it is planted in, and where it first shows
FAULTS: list[tuple[type[Backend], str, dict[str, int], dict[str, Any], str]] = [
    (faults.ReplicasNotSummed, "lasp", TWO, {}, "gradient 0"),
    (faults.WeightsNotGathered, "lasp", TWO, {}, "weight 0"),
    (faults.UpdatesTheNextShard, "lasp", TWO, {}, "weight 0"),
    (faults.FlatGradientNotSummed, "lasp", TWO, {}, "gradient 0"),
    (faults.GradientNotSummed, "lasp", TWO, {}, "gradient 0"),
    (faults.MeanOverRanks, "lasp", TWO, {}, "gradient 0"),
    (faults.WeightsNotGatheredAnew, "lasp", TWO, {}, "gradient 1"),
    (faults.GradientsNotSummed, "single", TWO, {}, "gradient 0"),
    (faults.GradientsNotSummed, "lasp", REPLICAS, DISTRIBUTED, "gradient 0"),
    (faults.InstancesNotSummed, "lasp", REPLICAS, INSTANCES, "gradient 0"),
    (faults.LastMicroBatchAlone, "single", TWO, {}, "gradient 0"),
    (faults.SentBeforeTheLastMicroBatch, "single", TWO, BUCKETS, "gradient 0"),
    (faults.UpdatedFromTheNextElement, "single", TWO, DISTRIBUTED, "weight 0"),
    (faults.PartsNotGathered, "single", TWO, DISTRIBUTED, "gradient 1"),
    (faults.WeightsNotGatheredInForward, "single", TWO, GATHERED_LATE, "gradient 1"),
    (faults.TiedEmbeddingNotSummed, "single", STAGES, DISTRIBUTED, "gradient 0"),
    (faults.HookFiresTwice, "ulysses", TWO, ON_HOST, "gradient 0"),
    (faults.HookFiresTwice, "ulysses", TWO, PARAMETERS, "gradient 0"),
    (faults.MicroBatchesNotSummed, "ulysses", TWO, ON_HOST, "gradient 0"),
    (faults.GradientsOfTheStepBefore, "ulysses", TWO, ON_HOST, "gradient 1"),
    (faults.GradientsOfTheStepBefore, "ulysses", TWO, PARAMETERS, "gradient 1"),
    (faults.FlatGradientOfTheStepBefore, "ulysses", TWO, ON_HOST, "gradient 1"),
    (faults.ShardsNotSentBack, "ulysses", TWO, ON_HOST, "weight 0"),
    (faults.WeightsNotSentBack, "ulysses", TWO, ON_HOST, "weight 0"),
    (faults.BucketSummedTwice, "single", TWO, {}, "gradient 0"),
    (faults.LateBucketSummedTwice, "lasp", TWO, {}, "gradient 0"),
    (faults.BorderOneFurther, "single", TWO, {"use_multi_rank_bucket_allreduce": False}, "gradient 0"),
    (faults.MainWeightsNotSentBack, "ulysses", TWO, {**DISTRIBUTED, **ON_HOST}, "weight 0"),
]


@pytest.mark.parametrize(("fault", "strategy", "sizes", "options", "where"), FAULTS)
def test_a_planted_fault_is_seen(
    pool: RankPool, fault: type[Backend], strategy: str, sizes: dict[str, int], options: Any, where: str
) -> None:
    micro_batches = 1 if strategy == "lasp" and sizes == TWO else 2
    assert_first_wrong(pool, trained(fault.name, strategy, sizes, micro_batches, options), fault, where)


def test_every_backend_is_in_the_default_run() -> None:
    assert {case.values[0]["backend"] for case in CASES if not case.marks} >= {*all_backends()}
