"""Scenarios of splits over several axes: their cells in small, and searches on strategies around others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.measure.engines.engine import Candidates
from spbench.bench.measure.engines.search import largest_that_fits
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.scenarios.scenario import load_scenario
from tests.measure.engines.cells import write_cluster
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("kept_traces")

SCENARIOS = "four_d", "max_seqlen_4d"
TINY = {
    "bert-base": "bert-tiny",
    "bert-large": "bert-tiny",
    "causal-transformer-1b": "causal-transformer-tiny",
    "tnl-1b": "tnl-tiny",
}


def declared(scenario: str) -> list[Cell]:
    return [cell for cells in load_scenario(scenario).cells.values() for cell in cells]


def in_small(cell: Cell) -> Cell:
    """The cell with a tiny model, two ranks along each axis that has several, and a short sequence."""
    sizes = {axis: min(2, size) for axis, size in cell.sizes.by_axis.items()}
    micro_batches = min(2, cell.training.micro_batches)
    content = cell.model_dump() | {
        "model": TINY[cell.model],
        "sizes": sizes,
        "batch": 4,
        "seq_len": 64,
        "search": None,
        "training": {**cell.training.model_dump(), "micro_batches": micro_batches},
        "variant": "",
    }
    return Cell.model_validate(content)


def kinds() -> Iterator[Any]:
    """Every cell of the scenarios in small, once, without the order of its mesh."""
    found = {}
    for cell in (cell for name in SCENARIOS for cell in declared(name)):
        small = in_small(cell).model_copy(update={"mesh": None})
        found[small.key] = small
    for cell in found.values():
        name = f"{cell.model} {cell.strategy} {cell.mesh_text} {cell.training.backend} {cell.key[-4:]}"
        # one of each strategy and model in every run, pipelines and other settings in the slow one
        marks = (
            [pytest.mark.slow] if {"pp", "dp"} & {a for a, n in cell.sizes.by_axis.items() if n > 1} else []
        )
        yield pytest.param(cell, id=name, marks=marks)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cell", list(kinds()))
def test_closed_forms_hold_for_every_kind_of_cell(cell: Cell) -> None:
    found = VirtualEngine().measure(cell)
    assert (found.status, found.reason) == ("ok", "")
    assert found.formula_difference == []
    sent = {axis for entry in found.communication for axis in entry["axis"].split("_") if entry["sent_bytes"]}
    assert sent == {axis for axis, size in cell.sizes.by_axis.items() if size > 1}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_cells_are_of_sixty_four_gpus(scenario: str) -> None:
    cells = declared(scenario)
    assert {cell.sizes.world for cell in cells} == {64}
    both = [cell for cell in cells if cell.sizes.tp > 1 and cell.sizes.sp > 1]
    assert len(both) > len(cells) / 3


def test_panels_of_four_d_have_the_same_work() -> None:
    by_model = {(cell.model, cell.cluster, cell.batch, cell.seq_len) for cell in declared("four_d")}
    assert by_model == {
        ("bert-large", "piz-daint-p100", 512, 512),
        ("bert-large", "piz-daint-p100", 64, 2048),
        ("causal-transformer-1b", "dgx-a100", 16, 131072),
        ("tnl-1b", "dgx-a100", 4, 1048576),
    }


def test_some_cells_of_four_d_differ_in_the_order_of_the_mesh_alone() -> None:
    cells = declared("four_d")
    by_content: dict[str, list[Cell]] = {}
    for cell in cells:
        by_content.setdefault(cell.model_copy(update={"mesh": None}).key, []).append(cell)
    pairs = [some for some in by_content.values() if len(some) > 1]
    assert len(pairs) >= 4
    assert all(len({cell.mesh_text for cell in some}) == len(some) for some in pairs)


def test_the_order_of_a_mesh_moves_time_and_no_byte() -> None:
    """Tensor parallelism within a node and across nodes, around a ring."""
    settings = {
        "model": "causal-transformer-tiny",
        "strategy": "megatron_sp+ring_attention",
        "cluster": "dgx-a100-datasheet",
        "sizes": {"tp": 4, "sp": 8},
        "batch": 2,
        "seq_len": 8192,
        "precision": "bf16",
        "model_options": {"hidden": 256, "heads": 8, "inner": 1024},
        "strategy_options": {"placement": "zigzag"},
    }
    inside, across = (
        VirtualEngine().measure(Cell.model_validate({**settings, "mesh": mesh}))
        for mesh in (["sp", "tp"], ["tp", "sp"])
    )
    assert inside.communication == across.communication
    assert inside.peak_memory_bytes == across.peak_memory_bytes
    assert abs(inside.step_time_s / across.step_time_s - 1) > 0.05


# -- searches ------------------------------------------------------------------------------------------------


def searching(folder: Path, mib: int, strategy: str, sizes: dict[str, int], **changes: Any) -> Cell:
    content = {
        "model": "bert-tiny",
        "strategy": strategy,
        "sizes": sizes,
        "batch": 4,
        "precision": "fp16",
        "cluster": write_cluster(folder, mib),
        "search": {"quantity": "seq_len"},
    }
    return Cell.model_validate(content | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes", "changes", "multiple"),
    [
        slow("megatron_sp+ring_self_attention", {"tp": 2, "sp": 3}, {}, 6),
        slow("tensor_parallel+ring_self_attention", {"tp": 2, "sp": 3}, {}, 3),
        slow(
            "ulysses+ring_self_attention",
            {"sp": 2, "cp": 2},
            {"search": {"quantity": "seq_len", "step": 2}},
            8,
        ),
        # a zigzag's rank has two chunks, so that a multiple of the ranks is not enough
        (
            "tensor_parallel+ring_attention",
            {"tp": 2, "sp": 3},
            {"model": "causal-transformer-tiny", "strategy_options": {"placement": "zigzag"}},
            6,
        ),
    ],
)
def test_the_longest_sequence_of_a_composed_strategy_is_proved(
    tmp_path: Path, strategy: str, sizes: dict[str, int], changes: dict[str, Any], multiple: int
) -> None:
    cell = searching(tmp_path, 60, strategy, sizes, **changes)
    assert Candidates(cell).values.step == multiple
    found = largest_that_fits(cell)
    assert found.formula_difference == []
    tried = {probe["value"]: probe["status"] for probe in found.proof}
    assert tried[found.answer] == "ok"
    assert tried[found.answer + multiple] == "oom"


@pytest.mark.slow
def test_the_largest_batch_of_a_composed_strategy_is_proved(tmp_path: Path) -> None:
    cell = searching(
        tmp_path,
        60,
        "megatron_sp+ring_self_attention",
        {"dp": 2, "tp": 2, "sp": 2},
        batch=None,
        seq_len=128,
        search=SearchRequest(quantity="batch"),
    )
    found = largest_that_fits(cell)
    tried = {probe["value"]: probe["status"] for probe in found.proof}
    assert (tried[found.answer], tried[found.answer + 2]) == ("ok", "oom")
