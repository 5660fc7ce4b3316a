"""The order of the mesh in scenario files: in keys, lists of orders, choosing among cells, and mistakes.
Where cells' tensors are, and which rank is played: by default, as asked for, and what cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spbench.bench.cell import Cell, Sizes
from spbench.bench.errors import UserError
from spbench.bench.measure import Scenario, verify_cases
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.expand import on_device, playing_rank
from spbench.bench.measure.scenarios.select import UNSET, Narrowing, differing_settings
from spbench.bench.setting_values import MOST_RANKS
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.selector import Selector

RING: dict[str, Any] = {"strategy": "ring_self_attention", "sizes": {"sp": 4}}
GROUPS: list[dict[str, Any]] = [
    {**RING, "sizes": {"dp": 2, "sp": [2, 4]}, "mesh": [["dp", "sp"], ["sp", "dp"]]},
    {"strategy": "tensor_parallel", "sizes": {"dp": 2, "tp": 2}, "mesh": ["tp", "dp"]},
]


def scenario(folder: Path, groups: list[dict[str, Any]], **sections: Any) -> Scenario:
    """The groups as a scenario file, mesh.yaml."""
    defaults = {"model": "bert-tiny", "batch": 4, "seq_len": 24, **sections.pop("defaults", {})}
    path = folder / "mesh.yaml"
    path.write_text(yaml.safe_dump({"title": "Orders", "defaults": defaults, "groups": groups, **sections}))
    return load_scenario(path)


def chosen(of: Scenario, **narrowing: Any) -> list[str]:
    return [cell.mesh_text for cell in Narrowing(**narrowing).cells(of)]


def test_the_order_is_part_of_a_cells_key_where_it_is_not_the_default() -> None:
    def cell(mesh: list[str] | None = None) -> Cell:
        return Cell.model_validate(
            {"model": "m", "strategy": "s", "sizes": {"dp": 2, "sp": 4}, "mesh": mesh}, strict=True
        )

    for default in (None, ["dp", "sp"], ["dp", "pp", "tp", "sp"]):
        assert cell(default).mesh is None
        assert cell(default).key == "m/s/dp2xsp4/bmax/Lmax/fp32/local/virtual/d1ed6e5e5e"  # as without orders
    other = cell(["pp", "sp", "dp"])
    assert other.key.startswith("m/s/sp4xdp2/bmax/Lmax/fp32/local/virtual/")
    assert [*other.mesh_sizes] == ["pp", "sp", "dp", "cp", "tp"]
    assert Cell.model_validate_json(other.model_dump_json()) == other


def test_lists_of_orders_multiply(tmp_path: Path) -> None:
    of = scenario(tmp_path, GROUPS)
    cells = of.cells[""]
    assert [cell.mesh_text for cell in cells] == ["dp2xsp2", "sp2xdp2", "dp2xsp4", "sp4xdp2", "tp2xdp2"]
    assert differing_settings(cells)["mesh"] == [UNSET, "sp dp", "tp dp"]
    assert chosen(of, where=[("mesh", "sp dp")]) == ["sp2xdp2", "sp4xdp2"]
    assert chosen(of, where=[("mesh", UNSET)]) == ["dp2xsp2", "dp2xsp4"]
    with pytest.raises(UserError, match=r"has mesh dp sp; they have: unset, sp dp, tp dp$"):
        chosen(of, where=[("mesh", "dp sp")])


def test_a_variant_may_have_an_order(tmp_path: Path) -> None:
    groups = [{**RING, "sizes": {"dp": 2, "sp": 4}}]
    variants = {"inside": {}, "outside": {"mesh": ["sp", "dp"]}}
    of = scenario(tmp_path, groups, variants=variants)
    assert chosen(of, variant="all") == ["dp2xsp4", "sp4xdp2"]


def test_sizes_that_are_made_keep_the_order(tmp_path: Path) -> None:
    assert chosen(scenario(tmp_path, GROUPS), world_sizes=[16]) == ["dp2xsp8", "sp8xdp2", "tp8xdp2"]
    groups = [{**RING, "sizes": {"dp": 2, "pp": 2}, "mesh": ["pp", "dp"]}]
    (cell,) = Narrowing(world_sizes=[16]).cells(scenario(tmp_path, groups))
    assert cell.mesh_text == "pp2xdp2xsp4"
    assert Cell.model_validate(cell.model_dump()) == cell


@pytest.mark.parametrize(
    ("given", "selected"),
    [
        ({"mesh": ["sp", "dp"]}, ["sp2xdp2", "sp4xdp2"]),
        ({"mesh": ["dp", "pp", "sp"]}, ["dp2xsp2", "dp2xsp4"]),
        ({"mesh": ["pp", "sp", "dp"], "sizes": {"sp": 4}}, ["sp4xdp2"]),
        ({"sizes": {"sp": 1}}, ["tp2xdp2"]),
    ],
)
def test_a_selector_names_the_order(tmp_path: Path, given: dict[str, Any], selected: list[str]) -> None:
    cells = scenario(tmp_path, GROUPS).cells[""]
    assert [cell.mesh_text for cell in Selector.model_validate(given).select(cells)] == selected


USED = "the strategy ring_self_attention does not use the axis cp; write sizes: {sp: 2}"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"sizes": {"cp": 2}}, f"groups[0].sizes.cp: 2: {USED}"),
        ({"mesh": ["sp", "pd"]}, "groups[0].mesh: unknown axis 'pd'; the axes are dp, pp, cp, tp, sp"),
        ({"mesh": ["sp", "dp", "sp"]}, "groups[0].mesh: the axis sp is there 2 times; name it once"),
        ({"mesh": ["dp"]}, "groups[0].mesh: leaves out the axis sp, which has 4 ranks; add it"),
        ({"mesh": "sp"}, "groups[0].mesh: must be a valid list, not 'sp'"),
        ({"mesh": []}, "groups[0].mesh: is an empty list"),
        ({"mesh": [["sp"], ["xp"]]}, "groups[0].mesh: unknown axis 'xp'"),
        ({"mesh": [["sp"], ["dp", "sp"]]}, "groups[0]: the cell bert-tiny/ring_self_attention/sp4/"),
    ],
)
def test_mistakes_are_one_line_with_file_and_key(tmp_path: Path, group: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        scenario(tmp_path, [RING | group])
    assert str(caught.value).startswith(f"{tmp_path / 'mesh.yaml'}: {message}")


def test_a_selector_with_an_unknown_axis_is_refused(tmp_path: Path) -> None:
    claim = {"claim": "c", "published": {"file": "c.csv"}, "cells": {"cell": {"mesh": ["spp"]}}}
    with pytest.raises(UserError, match=r"values\[0\]\.cells\.cell\.mesh: unknown axis 'spp'"):
        scenario(tmp_path, [RING], values=[claim])


def test_as_many_ranks_as_there_can_be() -> None:
    assert Sizes(dp=MOST_RANKS // 2, sp=2).world == MOST_RANKS
    with pytest.raises(
        ValueError, match=f"are {MOST_RANKS // 2 * 3} ranks; there can be {MOST_RANKS} at most"
    ):
        Sizes(dp=MOST_RANKS // 2, sp=3)


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
    rows = verify_cases(["ulysses"], ["bert-tiny"], [2], parts=["block"], device="cuda", pool=pool)
    (row, *_) = rows
    assert (row.status, row.reason) == (
        "unsupported",
        "needs 1 GPUs, and this machine has 0; start it with torchrun",
    )
