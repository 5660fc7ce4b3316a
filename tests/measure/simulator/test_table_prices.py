"""Calls priced by tables of measured rates: on a measured call, turned, beyond the table, and in words."""

from __future__ import annotations

import pytest
import torch

from spbench.bench.measure.clusters.cluster import Calibration, load_cluster
from spbench.bench.measure.clusters.rate_tables import collective_tables, table_text
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import KERNEL, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.substitutes import kernel_substitutes
from spbench.bench.measure.simulator.table_prices import groups_of
from spbench.bench.measure.trace.operator_prices import price_of
from tests.measure.simulator.test_substitutes import of_links

H200 = load_cluster("h200-sxm")


def program_of(*calls: tuple[object, tuple[object, ...], object]) -> Program:
    b = ProgramBuilder((1, 1, 1, 1))
    for func, args, result in calls:
        price = price_of(func)
        b.add_kernel((KERNEL, b.named(price.name), *price.of(args, {}, result)))
    return b.program()


def matmul(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[object, ...]:
    a, b, c = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (k, n), (m, n)))
    return torch.ops.aten.mm.default, (a, b), c


def attention(batch: int, heads: int, groups: int, length: int) -> tuple[object, ...]:
    q, k = (torch.empty(batch, n, length, 128, dtype=torch.bfloat16, device="meta") for n in (heads, groups))
    lse = torch.empty(batch, heads, length, device="meta")
    return torch.ops.spbench.flash_attention.default, (q, k, k, 1.0, True), (torch.empty_like(q), lse)


def seconds(*calls: tuple[object, ...], kernel: str = "flash_attention_3") -> list[float]:
    program = program_of(*calls)  # type: ignore[arg-type]
    return Costs(H200, Calibration(), attention=kernel).kernels(program).tolist()


def test_a_measured_matmul_takes_what_it_took_and_so_does_its_transpose() -> None:
    own, turned = seconds(matmul(8192, 1024, 4096), matmul(1024, 8192, 4096))
    alone = measured_us("h200_sxm-matmul", "8192,1024,4096") / 1e6
    assert own == pytest.approx(turned) == pytest.approx(alone / 0.90)  # of which a step keeps 0.90


def test_matmuls_of_rows_that_are_not_aligned_take_as_long_as_the_card_took() -> None:
    words = [matmul(8192, n, 4096) for n in (100352, 100280, 100278, 100277)]
    aligned, eights, twos, odd = seconds(*words)
    assert eights == pytest.approx(aligned, rel=0.01)
    # milliseconds of results/gpu/2026-11-27-nvidia-h200-third/unaligned_matmul.csv beside those of 100,352
    assert twos / aligned == pytest.approx(23.42 / 9.533, rel=0.12)
    assert odd / aligned == pytest.approx(67.01 / 9.533, rel=0.25)
    # tokens are no row of anything that forward reads or writes
    assert seconds(matmul(8191, 4096, 4096)) == pytest.approx(seconds(matmul(8192, 4096, 4096)), rel=0.01)


def test_a_card_without_a_rate_of_unaligned_rows_says_so() -> None:
    program = program_of(matmul(8192, 100278, 4096), matmul(8192, 100280, 4096))  # type: ignore[arg-type]
    by_card = {name: Costs(load_cluster(name), Calibration()) for name in ("h200-sxm", "dgx-a100")}
    unaligned = {
        name: [
            e.tolist()
            for each, e in kernel_substitutes(costs, program)
            if "unaligned" in each.work and len(e)
        ]
        for name, costs in by_card.items()
    }
    assert unaligned == {"h200-sxm": [], "dgx-a100": [[0]]}


def test_a_table_of_which_nobody_knows_what_a_step_keeps_is_named() -> None:
    words = kernel_substitutes(
        Costs(load_cluster("h100-sxm-alone"), Calibration()),
        program_of(matmul(8192, 1024, 4096)),  # type: ignore[arg-type]
    )
    assert ("bf16 matmuls", "its table of short calls, without a power limit", "extrapolated") in [
        tuple(each) for each, events in words if len(events)
    ]


def measured_us(table: str, sizes: str) -> float:
    """Microseconds of the call of these sizes, as the file has them."""
    lines = table_text(table).splitlines()
    return next(float(line.rpartition(",")[2]) for line in lines if line.startswith(f"{sizes},"))


def test_beyond_the_table_a_matmul_of_eight_times_the_rows_takes_about_eight_times_as_long() -> None:
    within, beyond = seconds(matmul(16384, 4096, 4096), matmul(131072, 4096, 4096))
    assert beyond == pytest.approx(8 * within, rel=0.02)
    words = list(kernel_substitutes(Costs(H200, Calibration()), program_of(matmul(131072, 4096, 4096))))  # type: ignore[arg-type]
    named = [tuple(each) for each, events in words if len(events)]
    assert named == [("bf16 matmuls", "the nearest of its table", "extrapolated")]


def test_attention_goes_by_its_length_heads_and_groups() -> None:
    call = program_of(attention(2, 16, 4, 4096))  # type: ignore[arg-type]
    assert groups_of(call, 0) == 8  # of both samples
    (own,) = seconds(attention(2, 16, 4, 4096))
    assert own == pytest.approx(measured_us("h200_sxm-flash_attention_3", "4096,32,8") / 1e6)


def test_other_kernels_precisions_and_cards_go_by_their_figures() -> None:
    (by_figure,) = seconds(attention(1, 32, 8, 4096), kernel="cudnn")
    assert by_figure == pytest.approx(2 * 128 * 32 * 4096 * 4097 / (583.1e12 / (1 + 325 / 4096)))
    (single,) = seconds(matmul(8192, 1024, 4096, torch.float32))
    assert single == pytest.approx(2 * 8192 * 1024 * 4096 / 66.9e12)


def test_collectives_of_a_node_take_what_they_took_and_grow_beyond() -> None:
    costs, table = Costs(H200, Calibration()), collective_tables("h200_sxm-collectives")["all_gather"]
    number = table.sizes.tolist().index([8.0, 2.0**20])
    (own,) = costs.collectives("all_gather", 2.0**20, [range(8)])
    assert own == pytest.approx(table.seconds[number])
    largest, twice = (costs.collectives("all_gather", size, [range(8)])[0] for size in (2.0**29, 2.0**30))
    assert twice == pytest.approx(2 * largest, rel=0.01)
    # without one of its own a broadcast keeps its figures; over nodes the network is the slower part
    assert costs.collectives("broadcast", 2.0**29, [range(8)])[0] > 0
    assert costs.collectives("all_gather", 2.0**29, [range(16)])[0] > own


def test_groups_larger_than_those_of_the_table_and_tables_of_other_machines_are_named() -> None:
    of_four = ("all_to_all intra-node", "its rate of 4 ranks", "extrapolated")
    assert of_four in of_links(load_cluster("gb300-nvl72"), 8)
    assert of_four not in of_links(load_cluster("gb300-nvl72"), 4)
    assert [work for work, _, _ in of_links(H200, 8)] == []
    # an L20 has the table of an L40S
    by = [by for work, by, _ in of_links(load_cluster("l20"), 8) if work == "all_to_all intra-node"]
    assert by == ["an L40S's"]


def test_a_node_of_pcie_cards_is_slower_the_more_of_it_a_group_has() -> None:
    """Eight L40S hang on two sockets: two, four and eight of them exchange at about 22, 5 and 2 GB/s."""
    costs, size = Costs(load_cluster("l40s"), Calibration()), 2.0**29
    rates = [
        (n - 1) / n * size / costs.collectives("all_to_all", size, [range(n)])[0] / 1e9 for n in (2, 4, 8)
    ]
    assert rates == pytest.approx([22.3, 4.5, 2.0], rel=0.03)


@pytest.mark.parametrize("name", ["b300-sxm", "gb300-nvl72", "rtx-pro-6000", "mi300x"])
def test_new_cards_are_timed_and_say_what_they_lack(name: str) -> None:
    on = load_cluster(name)
    program = program_of(matmul(4096, 4096, 4096), attention(1, 32, 8, 4096))  # type: ignore[arg-type]
    costs = Costs(on, Calibration(), attention="flash")
    peak = on.device.peak_flops_per_s["bf16"].value or 0.0
    of_matmul, of_attention = costs.kernels(program)
    assert 0.4 < 2 * 4096**3 / of_matmul / peak < 1.0
    assert 0.2 < program.flops[1] / of_attention / peak < 1.0
    lacks = [each.work for each, events in kernel_substitutes(costs, program) if len(events)]
    assert lacks, "each of these rests on another card's attention, or on none"
