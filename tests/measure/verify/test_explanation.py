"""Where a step goes wrong first: what verification says of planted faults beside that they are wrong."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.verify.cases import EQUAL, VerifyRow, verify_case, verify_cases
from spbench.bench.measure.verify.explanation import explain_values, unequal_calls
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import model_preset
from tests.measure.verify import attention_faults, head_faults, layer_faults

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
    rows = [*verify_cases(["ulysses"], [CAUSAL], [2], parts=["attention", "model"], pool=pool, explain=1)]
    assert {row.explanation for row in rows} == {""}
    assert {row.bytes for row in rows if row.part == "model" and row.status == "green"} == {EQUAL}


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
