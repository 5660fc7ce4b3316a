"""What ranks hold on their hosts: by hand and on virtual ranks, against what a node has. What NCCL takes of a
device to connect it with the others of its node."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.engines.rank_memory import (
    exchange_memory_bytes,
    host_peaks,
    limit_by_host,
    usable_memory_bytes,
)
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.simulator.program import HOST_WORK
from spbench.bench.measure.trace.memory import PAGEABLE
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measurement import Measurement
from tests.cells import make_cell
from tests.grid import tabled
from tests.measure.engines.cells import write_cluster

KIB = 2**10
#: rows of 48 features in bfloat16, of 3 x 24 positions: 6,912 bytes, for which 8 KiB are taken
ROUNDED = 8 * KIB
LAYERS = 4


def cell(cluster: str = "dgx-h100", **changes: Any) -> Cell:
    options = {"layers": LAYERS, "recompute": "full", "checkpoints": "host"}
    fields = {"model_options": options, "cluster": cluster} | changes
    return make_cell("causal-transformer-tiny", "tensor_parallel", {"tp": 2}, 3, 24, **fields)


def with_host(folder: Path, base: str = "dgx-h100", **figures: int | None) -> str:
    """A cluster with other figures of its host's memory; returns its path."""
    # far smaller than those of any host
    told = "source: made up, note: as it was asked for"
    lines = [f"  {name}: {{value: {'null' if n is None else n}, {told}}}" for name, n in figures.items()]
    path = folder / "host.yaml"
    path.write_text("\n".join([f"extends: {base}", "about: for tests", "host_memory:", *lines, ""]))
    return str(path)


@pytest.mark.parametrize(
    ("sizes", "events", "expected"),
    [
        ([], [], 0),
        # rounded up to powers of two
        ([1, 4, 5, 1025], [1, 2, 3, 4], 1 + 4 + 8 + 2048),
        # what was freed is given out again for its own size, and kept for it otherwise
        ([3, 4, 4], [1, -1, 2, 3], 8),
        ([4, 8, 4], [1, -1, 2, 3], 12),
        ([0, 4], [1, 2], 4),
    ],
)
def test_pinned_blocks_are_powers_of_two_and_are_kept(
    sizes: list[int], events: list[int], expected: int
) -> None:
    assert host_peaks(MemoryLog(sizes=sizes, events=events)) == [0, expected]


def test_pinned_bytes_of_set_up_and_each_step() -> None:
    log = MemoryLog([4, 4, 8, 2], [1, 2, -1, 3, 4, -4], [("forward", 1), ("forward", 4)], ends=[4, 6])
    assert host_peaks(log) == [4, 16, 18]


def test_the_inputs_of_all_layers_wait_on_the_host() -> None:
    found = VirtualEngine().measure(cell())
    assert found.status == "ok"
    assert found.peak_host_memory_bytes == LAYERS * ROUNDED
    assert found.node_host_memory_bytes == 2 * LAYERS * ROUNDED
    on_device = cell(model_options={"layers": LAYERS, "recompute": "full"})
    without = VirtualEngine().measure(on_device)
    assert (without.peak_host_memory_bytes, without.node_host_memory_bytes) == (None, None)
    kept, moved = (tracing.trace(each).memory for each in (on_device, cell()))
    assert len(kept.sizes) < len(moved.sizes)  # what is fetched is made anew


def test_the_device_holds_all_but_one_input_less() -> None:
    """Where the peak is at the loss, whose logits are large."""
    long = {"seq_len": 192, "batch": 2, "strategy": "single", "sizes": {}}
    options = {"layers": LAYERS, "recompute": "full", "vocabulary": 5000}
    device, host = (
        tracing.trace(cell(model_options=options | {"checkpoints": where}, **long)).memory
        for where in ("device", "host")
    )
    # neither the optimizer's phase nor what it makes
    at = {log.phase_of(n) for log in (device, host) for n in range(log.marks[0][1], log.marks[2][1])}
    assert at == {"forward", "backward"}
    sizes = [max_before(log, log.marks[2][1]) for log in (device, host)]
    assert sizes[0] - sizes[1] == (LAYERS - 1) * 192 * 2 * 48 * 2


def max_before(log: MemoryLog, end: int) -> int:
    return int(log.signed_bytes()[:end].cumsum().max())


def test_a_node_whose_host_has_too_little_is_out_of_memory(tmp_path: Path) -> None:
    needed = 2 * LAYERS * ROUNDED
    enough = VirtualEngine().measure(cell(with_host(tmp_path, total_bytes=needed)))
    assert (enough.status, enough.reason) == ("ok", "")
    full = VirtualEngine().measure(cell(with_host(tmp_path, total_bytes=needed - 1)))
    assert full.status == "oom"
    assert full.reason.startswith("the host of a node has 0.0 GiB of memory, and its 2 ranks hold 0.0 GiB")
    assert "though the devices have room" in full.reason
    assert full.step_time_s is None
    assert [entry["status"] for entry in full.by_class] == ["ok", "ok"]
    assert full.node_host_memory_bytes == needed


def test_the_sum_is_of_the_fullest_node() -> None:
    """The first stage of 1F1B holds two micro-batches' inputs, the last one's: 2 layers each, on 8 ranks."""
    asked = cell(sizes={"pp": 2, "tp": 2}, training={"micro_batches": 3})
    found = VirtualEngine().measure(asked)
    one = LAYERS // 2 * 4 * KIB  # of one sample: 2,304 bytes
    assert found.peak_host_memory_bytes == 2 * one
    assert found.node_host_memory_bytes == 2 * (2 * one) + 2 * one
    by_rank = [Measurement(peak_rank=rank, peak_host_memory_bytes=rank) for rank in range(4)]
    assert limit_by_host(Measurement(), asked, by_rank).node_host_memory_bytes == 6
    away = asked.model_copy(update={"cluster": "h100-pcie"})
    assert limit_by_host(Measurement(), away, by_rank).node_host_memory_bytes == 6


def test_a_cluster_without_a_link_gives_no_time_and_says_so(tmp_path: Path) -> None:
    unknown = with_host(tmp_path, link_bandwidth_bytes_per_s=None)
    found = VirtualEngine().measure(cell(unknown))
    assert found.status == "ok"
    assert found.step_time_s is None
    assert found.reason == (
        "no time: host: host_memory.link_bandwidth_bytes_per_s is unknown, over which device and host copy"
    )
    assert found.peak_host_memory_bytes == LAYERS * ROUNDED
    on_device = cell(unknown, model_options={"layers": LAYERS, "recompute": "full"})
    assert VirtualEngine().measure(on_device).step_time_s is not None


def test_a_slow_link_is_waited_for(tmp_path: Path) -> None:
    """With as slow a link as this, a step takes as long as its copies: all to the host, all but one back."""
    slow = VirtualEngine().measure(cell(with_host(tmp_path, link_bandwidth_bytes_per_s=1000)))
    assert slow.step_time_s == pytest.approx((2 * LAYERS - 1) * 6912 / 1000, rel=1e-3)
    assert slow.breakdown["exposed_communication_s"] == pytest.approx(slow.step_time_s, rel=1e-3)


def test_pageable_memory_has_rates_of_its_own(tmp_path: Path) -> None:
    """All inputs go there and all come back, each at its rate, at most the link's; pinned ones do not."""
    figures = {"pageable_to_host_bytes_per_s": 500, "pageable_to_device_bytes_per_s": 2000}
    options = {"layers": LAYERS, "recompute": "full", "checkpoints": "pageable"}
    on = with_host(tmp_path, link_bandwidth_bytes_per_s=1000, **figures)
    pageable = VirtualEngine().measure(cell(on, model_options=options))
    assert pageable.step_time_s == pytest.approx(LAYERS * 6912 * (1 / 500 + 1 / 1000), rel=1e-3)
    with_angles = VirtualEngine().measure(cell(on, model_options={**options, "checkpointed_angles": 8}))
    angles = LAYERS * 2 * 24 * 8 * 2 / 500  # in bfloat16
    assert with_angles.step_time_s == pytest.approx(pageable.step_time_s + angles, rel=1e-3)
    pinned = VirtualEngine().measure(cell(on))
    assert pinned.step_time_s == pytest.approx((2 * LAYERS - 1) * 6912 / 1000, rel=1e-3)


def test_torchs_save_on_cpu_is_waited_for(tmp_path: Path) -> None:
    """All inputs go to pinned memory and all come back; the host waits for each that goes alone."""
    options = {"layers": LAYERS, "recompute": "full", "checkpoints": "save_on_cpu"}
    asked = cell(with_host(tmp_path, link_bandwidth_bytes_per_s=1000), model_options=options)
    assert VirtualEngine().measure(asked).step_time_s == pytest.approx(2 * LAYERS * 6912 / 1000, rel=1e-3)
    program = tracing.trace(asked, events=True).program
    assert program.host[:, HOST_WORK.index("joins")].sum() == LAYERS


@pytest.mark.slow
def test_a_search_is_bounded_by_the_host(tmp_path: Path) -> None:
    asked = cell(
        with_host(tmp_path, total_bytes=2**20),
        seq_len=None,
        search=SearchRequest(quantity="seq_len", limit=2**14, step=8),
    )
    found = run_cell(asked)
    # 2 ranks x 4 layers x 3 x 96 bytes a position, rounded up to 128 KiB an input
    assert found.answer == 2**17 // (3 * 96) // 8 * 8
    assert len(found.proof) < 15
    assert "host" in next(probe["reason"] for probe in found.proof if probe["status"] == "oom")


def states_on_host(cluster: str, **training: object) -> Cell:
    return cell(
        cluster,
        strategy="single",
        sizes={"dp": 2},
        batch=2,
        model_options={"layers": LAYERS},
        training={"optimizer": "host", **training},
    )


def elements_of_a_rank(asked: Cell) -> int:
    """Elements of its part of the weights, which is the larger one where they do not halve."""
    return max(tracing.trace(asked).host_memory.sizes) // 4


@pytest.mark.slow
def test_states_on_the_host_by_program() -> None:
    """Bytes a parameter of a rank's part: DeepSpeed's ZeRO-3 has a pinned buffer of gradients beside float32
    masters, gradients and moments; torch's CPUOffloadPolicy has these alone, a tensor each."""
    part = elements_of_a_rank(states_on_host("dgx-h100", backend="zero3"))
    deepspeed, torch_s = (
        tracing.trace(states_on_host("dgx-h100", backend="zero3", **options)).host_memory
        for options in ({}, {"parameters": "host"})
    )
    for log, pinned, pageable in ((deepspeed, 4 + 2, 4 + 8), (torch_s, 4 + 4, 8)):
        events = log.events[: log.step_ends[-1]]
        alive = {event for event in events if event > 0} - {-event for event in events if event < 0}
        sizes = [0, 0]
        for event in alive:
            sizes[log.tags.get(event - 1) == PAGEABLE] += log.sizes[event - 1]
        assert sizes == pytest.approx([pinned * part, pageable * part], rel=0.02)


def test_the_cores_of_a_host_are_shared_by_the_ranks_of_its_node(tmp_path: Path) -> None:
    """On cores as slow as these a step takes as long as its update: of float32 masters, gradients and moments
    28 bytes, and 6 to round them; over all ranks, for these update at once."""
    slow = with_host(tmp_path, update_bytes_per_s=1000)
    asked = states_on_host(slow, backend="zero3")
    found = VirtualEngine().measure(asked)
    assert found.step_time_s == pytest.approx((28 + 6) * 2 * elements_of_a_rank(asked) / 1000, rel=0.01)


def test_gradients_in_pageable_memory_are_waited_for(tmp_path: Path) -> None:
    """A gradient in bfloat16 goes there and comes back, then goes there in float32; the weight comes back
    from pageable memory in any case. Nothing runs beside these copies."""
    figures = {"pageable_to_host_bytes_per_s": 500, "pageable_to_device_bytes_per_s": 1000}
    on = with_host(tmp_path, link_bandwidth_bytes_per_s=4000, update_bytes_per_s=10**12, **figures)
    pinned, pageable = (
        states_on_host(on, backend="zero3", pinned_gradients=choice) for choice in (True, False)
    )
    part = elements_of_a_rank(pinned)
    takes = [VirtualEngine().measure(each).step_time_s for each in (pinned, pageable)]
    expected = [part * ((2 + 2 + 4) / 4000 + 2 / 1000), part * ((2 + 4) / 500 + (2 + 2) / 1000)]
    assert takes == pytest.approx(expected, rel=0.02)


def test_a_host_whose_cores_are_not_known_gives_no_time_and_says_so(tmp_path: Path) -> None:
    unknown = with_host(tmp_path, update_bytes_per_s=None)
    found = VirtualEngine().measure(states_on_host(unknown, backend="zero3"))
    assert (found.status, found.step_time_s) == ("ok", None)
    assert found.reason == (
        "no time: host: host_memory.update_bytes_per_s is unknown, at which the host's cores update weights"
    )
    assert found.peak_host_memory_bytes


def test_copies_beside_updates_take_less_time(tmp_path: Path) -> None:
    """Megatron-Core's optimizer on the host makes them, where its option asks for it."""
    figures = {"update_bytes_per_s": 28_000, "link_bandwidth_bytes_per_s": 8_000}
    slow = with_host(tmp_path, **figures)
    options = {"backend": "megatron", "distributed_optimizer": True}
    apart, beside = (
        VirtualEngine().measure(states_on_host(slow, **options, overlap_cpu_optimizer_d2h_h2d=overlapped))
        for overlapped in (False, True)
    )
    part = model_parameters(states_on_host(slow)) / 2
    assert apart.step_time_s == pytest.approx(part * (2 * 28 / 28_000 + 8 / 8_000), rel=0.05)
    assert beside.step_time_s == pytest.approx(part * 2 * 28 / 28_000, rel=0.2)
    assert apart.peak_host_memory_bytes == beside.peak_host_memory_bytes


MIB = 2**20


def on_card(cluster: str, strategy: str, **changes: Any) -> Cell:
    asked = {"model": "causal-transformer-tiny", "strategy": strategy, "batch": 4, "seq_len": 24}
    return Cell.model_validate(asked | {"cluster": cluster} | changes)


@pytest.fixture(scope="module")
def nodes_of_four(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(write_cluster(tmp_path_factory.mktemp("clusters"), 100))
    of_peer = f"  memory_peer_bytes: {{value: {5 * MIB}, source: made up}}\nnetwork:"
    path.write_text("devices_per_node: 4" + path.read_text().replace("network:", of_peer))
    return str(path)


@tabled(__file__, "each_other_device_of_the_node_counts")
def test_each_other_device_of_the_node_counts(
    strategy: str, sizes: dict[str, int], peers: int, nodes_of_four: str
) -> None:
    asked = on_card(nodes_of_four, strategy, sizes=sizes)
    assert exchange_memory_bytes(asked) == peers * 5 * MIB
    assert usable_memory_bytes(asked) == (100 - 5 * peers) * MIB


def test_ranks_of_other_nodes_do_not_count(nodes_of_four: str) -> None:
    """Every other rank is in a group: two of three are in the first node."""
    asked = on_card(nodes_of_four, "tensor_parallel+ulysses", sizes={"tp": 2, "sp": 3})
    every_other = asked.model_copy(update={"mesh": ("pp", "dp", "cp", "sp", "tp")})
    assert exchange_memory_bytes(every_other) == 5 * MIB


def test_rows_have_what_is_left(nodes_of_four: str) -> None:
    row = VirtualEngine().measure(on_card(nodes_of_four, "ulysses", sizes={"sp": 4}))
    assert row.usable_memory_bytes == 85 * MIB


def test_a_cluster_need_not_know(tmp_path: Path) -> None:
    asked = on_card(write_cluster(tmp_path, 100), "ulysses", sizes={"sp": 4})
    assert exchange_memory_bytes(asked) is None
    assert usable_memory_bytes(asked) == 100 * MIB
