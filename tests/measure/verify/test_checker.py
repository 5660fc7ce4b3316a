"""The checker rejects what is wrong, and says where. Where a step goes wrong first: what verification says
of planted faults beside that they are wrong. Verification of the model of a config.json, in sizes that
float64 on a few ranks can take. Dropout keeps what all ranks of tensor parallelism hold alike.
"""

import gc
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tests.impls.models.huggingface as published
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.verify.cases import VerifyRow, verify_case, verify_cases
from spbench.bench.measure.verify.explanation import explain_values, unequal_calls
from spbench.bench.measure.verify.judged import discrepancies, relative_errors
from spbench.bench.measure.verify.verified_run import Case, VerifiedRun
from spbench.impls.backends.legacy_ddp import ContiguousGradients
from spbench.impls.models.bert import BertModel
from spbench.impls.place import Place
from spbench.impls.registries import all_models, all_strategies, model_preset
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.training.step import initialize
from tests.grid import tabled
from tests.measure.verify import attention_faults, head_faults, layer_faults

BACKWARD = "forward right, backward wrong: "


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_a_mean_in_place_of_a_sum_is_named_by_its_factor(pool: RankPool, dtype: str) -> None:
    case = Case(attention_faults.OneNthGradients, model_preset("bert-tiny"), "attention", dtype)
    row = verify_case(pool, case, 4)
    assert (row.status, row.factor) == ("RED", pytest.approx(0.25, rel=1e-2))
    assert row.verdict.startswith(f"{BACKWARD}{row.tensor} is 0.25 times the reference (residual ")


def test_other_wrong_tensors_are_named(pool: RankPool) -> None:
    row = verify_case(pool, Case(attention_faults.OneNthGradients, model_preset("bert-tiny"), "attention"), 2)
    assert row.verdict.endswith("; wrong too: gradient of layer.qkv.weight, gradient of layer.qkv.bias")
    row = verify_case(pool, Case(attention_faults.ZeroGradients, model_preset("bert-tiny"), "model"), 2)
    *_, named = row.verdict.split("; wrong too: ")
    assert len(named.split(", ")) == 4
    assert re.search(r" and \d+ more$", named)


def test_stale_blocks_are_no_factor(pool: RankPool) -> None:
    case = Case(attention_faults.StaleBlockInBackward, model_preset("bert-tiny"), "attention")
    row = verify_case(pool, case, 4)
    assert (row.status, row.factor) == ("RED", None)
    assert row.verdict.startswith(f"{BACKWARD}{row.tensor} is off by {row.error:.1e}, not a scale")
    assert " times the reference" not in row.verdict


def test_gradients_of_zero_are_said_to_be_zero(pool: RankPool) -> None:
    row = verify_case(pool, Case(attention_faults.ZeroGradients, model_preset("bert-tiny"), "attention"), 2)
    assert row.verdict.startswith(f"{BACKWARD}{row.tensor} is zero")


def test_one_in_a_million_on_one_rank_is_seen_there(pool: RankPool) -> None:
    row = verify_case(
        pool, Case(attention_faults.SlightlyWrongOnLastRank, model_preset("bert-tiny"), "attention"), 4
    )
    assert (row.status, row.tensor, row.rank) == ("RED", "gradient of input x", 3)
    assert row.error == pytest.approx(1e-6, rel=1e-3)


def test_nan_is_an_infinite_error(pool: RankPool) -> None:
    row = verify_case(pool, Case(attention_faults.NanOnLastRank, model_preset("bert-tiny"), "attention"), 2)
    assert row.error == math.inf
    assert row.verdict.startswith(f"{BACKWARD}{row.tensor} is not finite")


def test_what_a_rank_raises_is_red(pool: RankPool) -> None:
    row = verify_case(
        pool, Case(attention_faults.RaisesOnLastRank, model_preset("bert-tiny"), "attention"), 4
    )
    assert (row.status, row.rank, row.error) == ("RED", 3, math.inf)
    assert "ArithmeticError: planted" in row.reason


def test_a_wrong_closed_form_is_red(pool: RankPool) -> None:
    row = verify_case(pool, Case(layer_faults.WrongClosedForm, model_preset("bert-tiny"), "model"), 2)
    assert (row.status, row.tensor) == ("RED", "backward all_reduce over tp")
    sent, counted = map(int, re.findall(r"\d+", row.verdict))
    assert (
        row.verdict
        == f"values right: backward all_reduce over tp sends {sent} bytes, {counted} by the closed form"
    )
    assert counted == 2 * sent > 0


def test_parameters_that_closed_forms_do_not_have_are_red(pool: RankPool) -> None:
    row = verify_case(
        pool, Case(layer_faults.SplitsTheVocabularyInSilence, model_preset("bert-tiny"), "model"), 2
    )
    assert (row.status, row.tensor) == ("RED", "parameters")
    assert re.fullmatch(r"values right: parameters are \d+ elements, \d+ by the model's sites", row.verdict)


def test_relative_error_is_that_of_norms() -> None:
    reference = {"x": torch.tensor([3.0, 4.0])}
    assert relative_errors(reference, {"x": torch.tensor([3.0, 4.5])}) == {"x": pytest.approx(0.1)}
    assert relative_errors(reference, {"x": torch.tensor([3.0, 4.0], dtype=torch.bfloat16)}) == {"x": 0}


@pytest.mark.parametrize(
    "got",
    [
        {},
        {"x": None},
        {"x": torch.ones(3)},
        {"x": torch.ones(1, 2)},
        {"x": torch.tensor([1.0, float("nan")])},
        {"x": torch.tensor([1.0, float("inf")])},
    ],
)
def test_missing_misshapen_or_not_finite_is_infinite(got: dict[str, torch.Tensor | None]) -> None:
    assert relative_errors({"x": torch.ones(2)}, got) == {"x": math.inf}


def test_tensor_that_the_reference_lacks_is_infinite() -> None:
    x = torch.ones(2)
    assert relative_errors({"x": x}, {"x": x, "y": x}) == {"x": 0, "y": math.inf}


def test_zero_reference_asks_for_exact_zero() -> None:
    zero = {"x": torch.zeros(2)}
    assert relative_errors(zero, {"x": torch.zeros(2)}) == {"x": 0}
    assert relative_errors(zero, {"x": torch.tensor([0.0, 1e-300], dtype=torch.float64)}) == {"x": math.inf}


def test_tiny_numbers_do_not_underflow() -> None:
    tiny = torch.full((2,), 1e-200, dtype=torch.float64)
    assert relative_errors({"x": tiny}, {"x": 2 * tiny}) == {"x": pytest.approx(1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zeros_are_judged_by_the_rounding_of_the_largest_number(dtype: torch.dtype) -> None:
    reference, rounding = {"zero": torch.zeros(2), "y": torch.full((1,), 8.0)}, 8 * torch.finfo(dtype).eps
    for factor, error in ((0.5, 0.0), (2.0, float("inf"))):
        got = reference | {"zero": torch.full((2,), factor * rounding, dtype=dtype)}
        assert relative_errors(reference, got) == {"zero": error, "y": 0.0}


def test_the_factor_is_of_least_squares_and_the_residual_of_what_it_leaves() -> None:
    reference = {"x": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    # 0.5 ref, and 0.3 across it
    found = discrepancies(reference, {"x": torch.tensor([1.5 - 0.24, 2.0 + 0.18], dtype=torch.float64)})["x"]
    assert found.scale == pytest.approx(0.5)
    assert found.residual == pytest.approx(0.3 / 2.5)
    assert found.factor(0.1) is None
    assert found.factor(0.2) == pytest.approx(0.5)


def test_digits_of_a_factor_are_those_that_the_residual_leaves() -> None:
    reference = torch.linspace(1, 2, 100, dtype=torch.float64)
    sliver = discrepancies({"x": reference}, {"x": reference * (1 + 1e-6)})["x"]
    assert sliver.described(1e-10).startswith("is 1.000001 times the reference")
    rough = discrepancies({"x": reference}, {"x": (reference / 3).to(torch.bfloat16)})["x"]
    assert rough.described(0.02).startswith("is 0.333 times the reference")


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        (None, "is missing"),
        (torch.ones(3), "has the shape [3], not [2]"),
        (torch.tensor([1.0, float("nan")]), "is not finite"),
        (-torch.ones(2), "is -1 times the reference (residual 0e+00)"),
    ],
)
def test_what_is_said_of_a_wrong_tensor(got: torch.Tensor | None, problem: str) -> None:
    assert discrepancies({"x": torch.ones(2)}, {"x": got})["x"].described(1e-10) == problem


def runs_alive(mesh: DeviceMesh) -> int:
    gc.collect()
    return sum(type(each) is VerifiedRun for each in gc.get_objects())


def test_a_run_ends_with_its_job(pool: RankPool) -> None:
    """Its groups' threads would wake up for ever: routers and hooks of its graph lead back to it."""
    before = pool.run({"sp": 2}, runs_alive)
    case = Case(all_strategies()["ulysses"], model_preset("moe-tiny"), "model", backend="zero3")
    assert verify_case(pool, case, 2).status == "green"
    assert pool.run({"sp": 2}, runs_alive) == before


CAUSAL = "causal-transformer-tiny"


def explained(pool: RankPool, fault: Any, model: str, part: str, ranks: int) -> VerifyRow:
    return verify_case(pool, Case(fault, model_preset(model), part), ranks, explain=True)


def test_a_stale_block_is_seen_by_rank_and_positions(pool: RankPool) -> None:
    """The last rank has no block after its own, so that its gradients are right."""
    row = explained(pool, attention_faults.StaleBlockInRingBackward, CAUSAL, "attention", 4)
    assert row.verdict.startswith("forward right, backward wrong: ")
    first, before, _, positions, *ranks, after = row.explanation.splitlines()
    assert first.startswith(
        "first wrong in the order of execution: gradient of v of attention 0 is off by 3.9e+00"
    )
    assert before == "right before it: gradient of o of attention 0"
    assert positions.split() == ["positions", "0-2", "3-5", "6-8", "9-11", "12-14", "15-17", "18-20", "21-23"]
    assert [len(line.split()) for line in ranks] == [4] * 4
    assert [line.split()[2:] == [".", "."] for line in ranks] == [False, False, False, True]
    # under the blocks that the rank has
    assert [positions.index(at) for at in ("6-8", "9-11")] == [
        ranks[1].index(error) for error in ranks[1].split()[2:]
    ]
    assert after.startswith("wrong after it: gradient of k of attention 0, gradient of q of attention 0")


@pytest.mark.parametrize(
    ("fault", "model", "where", "first"),
    [
        (
            attention_faults.KeyGradientsNotReduced,
            "bert-tiny",
            "forward right",
            "gradient of k of attention 0 is off",
        ),
        (
            attention_faults.OneNthGradients,
            "bert-tiny",
            "forward right",
            "gradient of v of attention 0 is 0.5 times",
        ),
        (head_faults.HeadsInWrongOrder, CAUSAL, "wrong in forward", "o of attention 0 is off"),
        (attention_faults.MaskForgotten, "bert-tiny", "wrong in forward", "o of attention 0 is off"),
    ],
)
def test_the_first_wrong_tensor(pool: RankPool, fault: Any, model: str, where: str, first: str) -> None:
    row = explained(pool, fault, model, "attention", 2)
    assert row.verdict.startswith(where)
    assert row.explanation.startswith(f"first wrong in the order of execution: {first}")
    assert row.bytes == ""  # there is no closed form of a part


def test_a_message_that_is_left_out(pool: RankPool) -> None:
    """In the bytes of the whole model; the gradients go wrong in the last block first."""
    row = explained(pool, layer_faults.ColumnInputGradientNotReduced, "bert-tiny", "model", 2)
    assert row.bytes == "backward all_reduce over tp sends 27648 bytes, 138240 by the closed form"
    assert "execution: gradient of blocks.1.attention_end.norm.weight is off" in row.explanation
    assert "its error by rank (. is right): rank 0 " in row.explanation
    wrong_form = explained(pool, layer_faults.WrongClosedForm, "bert-tiny", "model", 2)
    assert (wrong_form.explanation, wrong_form.bytes[:19]) == ("", "backward all_reduce")


def test_the_first_rows_are_explained_and_no_green_one(pool: RankPool) -> None:
    asked: Any = {"parts": ["attention", "model"], "model_options": {"layers": 1}, "explain": 1}
    rows = [*verify_cases(["ulysses"], [CAUSAL], [2], pool=pool, **asked)]
    assert {row.explanation for row in rows} == {""}
    assert {row.bytes for row in rows if row.part == "model" and row.status == "green"} == {VerifyRow.EQUAL}


def test_what_a_rank_raises_is_a_line_beside_its_traceback(pool: RankPool) -> None:
    row = explained(pool, attention_faults.RaisesOnLastRank, "bert-tiny", "attention", 2)
    assert (row.reason, row.explanation, row.bytes) == ("rank 1: ArithmeticError: planted", "", "")
    assert "Traceback" in row.traceback


def call(name: str, nbytes: int, at: str = "mine.py:7") -> dict[str, Any]:
    return {"name": name, "bytes": nbytes, "ranks": [0, 1], "at": at}


SUM, GATHER = call("all_reduce", 24), call("all_gather", 48, "mine.py:5")
UNEQUAL = [
    ([SUM, SUM, {}], [SUM, SUM, {}], ""),
    (
        [SUM, GATHER],
        [SUM, SUM],
        "(call 2 of ranks 0, 1): rank 0 is in all_gather of 48 bytes at mine.py:5, rank 1 is in all_reduce",
    ),
    (
        [SUM],
        [call("all_reduce", 32)],
        "rank 0 is in all_reduce of 24 bytes at mine.py:7, rank 1 is in all_red",
    ),
    ([SUM, {}], [SUM, SUM], "rank 0 has come to its end, rank 1 is"),
    ([], [SUM], "rank 0 has called none, rank 1 is in all_reduce"),
    (
        [call("recv", 8)],
        [SUM],
        "rank 0 does not come to it: its last is recv of 8 bytes at mine.py:7, rank 1",
    ),
    ([call("send", 8), {}], [call("recv", 8), {}], ""),
]


@pytest.mark.parametrize(("zero", "one", "said"), UNEQUAL)
def test_unequal_collectives_are_named(tmp_path: Path, zero: list[Any], one: list[Any], said: str) -> None:
    for rank, calls in enumerate((zero, one)):
        (tmp_path / str(rank)).write_text("".join(json.dumps(each) + "\n" for each in calls))
    found = unequal_calls(tmp_path)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            head_faults.GathersWhereOthersReduce,
            r"rank 0 is in all_gather of 48 bytes at head_faults.py:\d+, rank 1 is in all_reduce",
        ),
        (
            head_faults.SkipsACollective,
            r"rank 0 is in all_to_all .*, rank 1 is in all_reduce of 8 bytes",
        ),
    ],
)
def test_unequal_collectives_on_real_ranks(fault: Any, said: str) -> None:
    with RankPool(2, timeout_s=20) as pool:
        row = explained(pool, fault, CAUSAL, "attention", 2)
    assert re.search(said, row.explanation)


def test_a_case_is_run_again_on_its_device_by_its_backend() -> None:
    asked: list[dict[str, Any]] = []

    class Elsewhere:
        def run(self, sizes: Any, job: Any, *arguments: Any, **place: Any) -> Any:
            asked.append(place)
            raise RankError(1, "it failed")

    case = Case(attention_faults.StaleBlockInRingBackward, model_preset(CAUSAL), "attention")
    said = explain_values(cast(Any, Elsewhere()), case, {"sp": 2}, "cuda", "nccl")
    assert said.startswith("run once more, it failed: rank 1: it failed")
    assert asked == [{"device": "cuda", "backend": "nccl"}]


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
