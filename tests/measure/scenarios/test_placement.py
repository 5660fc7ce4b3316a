"""Where cells' tensors are, and which rank is played: by default, as asked for, and what cannot be."""

from __future__ import annotations

import pytest
import torch

from spbench.bench.cell import Cell, Sizes
from spbench.bench.errors import UserError
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.expand import on_device, playing_rank
from spbench.bench.measure.verify.cases import verify

VIRTUAL = Cell(model="bert-tiny", strategy="ulysses", sizes=Sizes(sp=4), batch=2, seq_len=24)
REAL = VIRTUAL.model_copy(update={"engine": "distributed"})
EMULATED = VIRTUAL.model_copy(update={"engine": "emulated"})


@pytest.mark.parametrize(
    ("asked", "there", "expected"),
    [
        ("available", True, ["cpu", "cuda", "cuda"]),
        ("available", False, ["cpu", "cpu", "cpu"]),
        ("cpu", True, ["cpu", "cpu", "cpu"]),
        ("cuda", True, ["cpu", "cuda", "cuda"]),
    ],
)
def test_real_tensors_are_on_the_device_that_is_there(
    monkeypatch: pytest.MonkeyPatch, asked: str, there: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    found = on_device([VIRTUAL, REAL, EMULATED], asked)  # type: ignore[arg-type]
    assert [cell.device for cell in found] == expected


def test_a_device_that_is_not_there_is_an_error_of_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=r"^--device cuda: torch .* leave out --device, or use cpu$"):
        on_device([REAL], "cuda")
    with pytest.raises(UserError, match=r"^--device cuda: the engine virtual uses no device; name one that"):
        on_device([VIRTUAL], "cuda")


def test_a_rank_is_one_of_the_cells_on_an_engine_that_plays_one() -> None:
    assert playing_rank([VIRTUAL], None) == [VIRTUAL]
    (cell,) = playing_rank([EMULATED], 3)
    assert (cell.rank, cell.key == EMULATED.key) == (3, False)
    with pytest.raises(UserError, match=r"--rank 4: .* has ranks 0 to 3; name one of these, or more ranks"):
        playing_rank([EMULATED], 4)
    with pytest.raises(UserError, match="--rank 0: the engine distributed does not play one alone"):
        playing_rank([REAL], 0)


def test_verification_on_gpus_without_one_is_unsupported(
    monkeypatch: pytest.MonkeyPatch, pool: RankPool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rows = verify(["ulysses"], ["bert-tiny"], [2], parts=["block"], device="cuda", pool=pool)
    (row, *_) = rows
    assert (row.status, row.reason) == (
        "unsupported",
        "needs 1 GPUs, and this machine has 0; start it with torchrun",
    )
