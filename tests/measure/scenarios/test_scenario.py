"""Scenario files: what they expand to, and one clear line for each way to get one wrong.
The order of the mesh in scenario files: in keys, lists of orders, choosing among cells, and mistakes.
Where cells' tensors are, and which rank is played: by default, as asked for, and what cannot be."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spbench.bench.cell import Cell, Sizes
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, cluster_names, load_cluster
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.choices import refusal
from spbench.bench.measure.scenarios.expand import on_device, playing_rank
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import UNSET, Narrowing, differing_settings
from spbench.bench.measure.verify.cases import verify_cases
from spbench.bench.setting_values import MOST_RANKS
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.selector import Selector
from spbench.bench.yaml_files import packaged
from tests.bench.fakes import SCENARIO
from tests.grid import data, tabled
from tests.tools.packaged import packaged_scenario


def write(folder: Path, text: str, name: str = "small.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return load_scenario(write(tmp_path, SCENARIO))


def changed(**changes: Any) -> str:
    """SCENARIO with some of its values replaced; a key like groups__0__batch is a path."""
    content = yaml.safe_load(SCENARIO)
    for path, value in changes.items():
        *steps, last = path.split("__")
        at = content
        for step in steps:
            at = at[int(step)] if step.isdecimal() else at.setdefault(step, {})
        at[last] = value
    return yaml.safe_dump(content, sort_keys=False)


def test_lists_multiply_and_settings_merge(scenario: Scenario) -> None:
    assert list(scenario.cells) == ["first", "steady"]
    cells = scenario.cells["first"]
    assert [str(c.sizes) for c in cells] == ["1", "tp2", "1", "sp4", "sp8"]
    assert {c.training.moments for c in cells} == {"later"}
    assert {c.variant for c in cells} == {"first"}
    ring = cells[-1]
    assert ring.model_options == {"dropout": 0.0, "layers": 3}  # defaults and group
    assert (ring.batch, ring.seq_len) == (64, None)
    keys = [c.key for declared in scenario.cells.values() for c in declared]
    assert len(set(keys)) == 10


def test_counts_may_end_in_powers_of_1024(tmp_path: Path) -> None:
    text = changed(defaults__batch="1K", defaults__search__limit="8M", defaults__search__step=128)
    cell = load_scenario(write(tmp_path, text)).cells["first"][0]
    assert (cell.batch, cell.search and cell.search.limit) == (1024, 2**23)
    assert cell.key.startswith("bert-tiny/tensor_parallel/1/b1024/")


def test_a_dry_run_says_what_cannot_run(tmp_path: Path) -> None:
    (cell, *_) = load_scenario(write(tmp_path, SCENARIO)).cells["first"]
    assert refusal(cell) == ""
    staged = cell.model_copy(update={"sizes": Sizes(pp=5)})
    assert "layers cannot be split over 5 pipeline stages" in refusal(staged)
    measured = cell.at(512)
    assert refusal(measured) == ""
    parted = measured.model_copy(update={"sizes": Sizes(dp=3)})
    assert refusal(parted).startswith("batch 64 cannot be divided into 3 micro-batches")


def test_several_lists(tmp_path: Path) -> None:
    text = changed(
        groups=[{"strategy": "single", "precision": ["fp16", "fp32"], "batch": [1, 2, 3]}],
        values=[],
        inferred_from=[],
    )
    cells = load_scenario(write(tmp_path, text)).cells["first"]
    assert [(c.precision, c.batch) for c in cells] == [(p, b) for b in (1, 2, 3) for p in ("fp16", "fp32")]


def test_packaged_scenarios_and_clusters_are_valid() -> None:
    for name in packaged("spbench.scenarios"):
        assert packaged_scenario(name).cells
    assert load_cluster("piz-daint-p100").usable_memory_bytes == 15430 * 2**20
    assert load_cluster("local").usable_memory_bytes is None
    assert {"local", "piz-daint-p100"} <= set(cluster_names())


def test_an_option_of_the_backend_is_part_of_a_cells_key_where_it_is_not_the_default() -> None:
    def key(**training: str) -> str:
        return Cell.model_validate({"model": "m", "strategy": "s", "training": training}).key

    assert key(gradients="contiguous") == key() == "m/s/1/bmax/Lmax/fp32/local/virtual/01e52c8be4"
    assert key(gradients="stale") == "m/s/1/bmax/Lmax/fp32/local/virtual/2eb9e854a0"
    stale = Cell.model_validate({"model": "m", "strategy": "s", "training": {"gradients": "stale"}})
    assert Cell.model_validate_json(stale.model_dump_json()) == stale
    assert stale.training.backend_options == {"gradients": "stale"}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (binary := tmp_path / "binary.yaml").write_bytes(b"title: \xff\xfe")
    for path, message in (
        (tmp_path / "absent.yaml", "no scenario file"),
        (tmp_path, "Is a directory"),
        (binary, "not a text file in UTF-8"),
        (Path("max_seqln"), "unknown scenario 'max_seqln'"),
    ):
        with pytest.raises(UserError, match=message):
            load_scenario(path)


def test_narrowing_chooses(scenario: Scenario) -> None:
    def worlds(**narrowing: Any) -> list[str]:
        return [f"{c.strategy[:4]}{c.sizes.world}" for c in Narrowing(**narrowing).cells(scenario)]

    assert worlds() == ["tens1", "tens2", "ring1", "ring4", "ring8"]
    assert worlds(strategies=["tensor_parallel"]) == ["tens1", "tens2"]
    assert worlds(world_sizes=[8, 2]) == ["ring8", "tens2"]
    assert worlds(variant="all") == worlds() + worlds()
    assert worlds(world_sizes=[5]) == ["tens5", "ring5"]  # none is declared, so both are made
    assert worlds(world_sizes=[2], strategies=["ring_self_attention"]) == ["ring2"]


def test_narrowing_replaces_cluster_and_engine(scenario: Scenario) -> None:
    cells = Narrowing(clusters=["local"], engines=["distributed"]).declared(scenario)
    assert {(c.cluster, c.engine) for c in cells} == {("local", "distributed")}
    assert len(Narrowing(clusters=["local", "piz-daint-p100"]).declared(scenario)) == 10


def test_single_device_has_no_other_size(tmp_path: Path) -> None:
    text = changed(groups=[{"strategy": "single"}], values=[], inferred_from=[], variants={})
    scenario = load_scenario(write(tmp_path, text))
    assert [c.variant for c in Narrowing(world_sizes=[1]).cells(scenario)] == [""]
    with pytest.raises(UserError, match="run on one rank, not 4"):
        Narrowing(world_sizes=[4]).cells(scenario)
    with pytest.raises(UserError, match="has no variants"):
        Narrowing(variant="first").cells(scenario)


def test_clusters_of_ones_own(tmp_path: Path) -> None:
    content: dict[str, Any] = copy.deepcopy(data(__file__)["OWN_CLUSTER"])
    path = write(tmp_path, yaml.safe_dump(content), "mine.yaml")
    with pytest.raises(UserError, match="leaves nothing of memory_total_bytes"):
        load_cluster(path)
    content["device"]["memory_context_bytes"] = {"value": 4000000, "source": "made up"}
    write(tmp_path, yaml.safe_dump(content), "mine.yaml")
    assert load_cluster(path).usable_memory_bytes == 6_000_000
    with pytest.raises(UserError, match=r"other.yaml: name: leave it out; a cluster has the name"):
        load_cluster(write(tmp_path, yaml.safe_dump(content | {"name": "mine"}), "other.yaml"))
    del content["network"]["latency_s"]["source"]
    with pytest.raises(UserError, match=r"network.latency_s.source: is missing"):
        load_cluster(write(tmp_path, yaml.safe_dump(content), "third.yaml"))


def test_a_cluster_extends_another(tmp_path: Path) -> None:
    own = {"extends": "dgx-a100", "about": "a test", "network": {"nics_per_node": 1}}
    mine, base = load_cluster(write(tmp_path, yaml.safe_dump(own), "mine.yaml")), load_cluster("dgx-a100")
    assert (mine.network.nics_per_node, base.network.nics_per_node) == (1, 8)
    assert mine.network.bandwidth_bytes_per_s == base.network.bandwidth_bytes_per_s
    assert mine.device == base.device
    own["extends"] = "dgx-a10"
    with pytest.raises(UserError, match=r"extends: unknown cluster 'dgx-a10'; did you mean 'dgx-a100'"):
        load_cluster(write(tmp_path, yaml.safe_dump(own), "again.yaml"))


def test_rates_belong_to_a_card_and_to_a_link(tmp_path: Path) -> None:
    def load(base: str, device: str, more: str = "") -> Cluster:
        return load_cluster(
            write(tmp_path, f"extends: {base}\nabout: a\ndevice: {{{device}}}\n{more}", "m.yaml")
        )

    halved = "peak_flops_per_s: {bf16: {value: 82.575e12, source: s}}"
    other, whose = load("rtx-4090", f"name: A6000, {halved}"), "NVIDIA GeForce RTX 4090 24 GB's"
    assert (other.device.matmul or {})["bf16"].share.substitute == _attention(other).substitute == whose
    assert _attention(other).value == _attention(load_cluster("rtx-4090")).value / 2  # as the peaks are
    assert other.node_link.bandwidth_bytes_per_s.substitute == whose
    own = load("h200-sxm", "name: H20, matmul: {bf16: {share: {value: 0.5, source: s}}}").device.matmul or {}
    assert (own["bf16"].table.value, own["fp16"].table.value, own["bf16"].share.substitute) == (
        None,
        None,
        "",
    )
    assert own["fp16"].share.substitute.startswith("NVIDIA H200")
    assert load("dgx-b200", "name: X").calibration["bf16"].fitted_on == []
    same = "same_processor: {value: NVIDIA H100 SXM5 80 GB, source: s}"
    assert _attention(load("dgx-h100", f"name: H100 NVL, {same}")).substitute == ""
    with pytest.raises(UserError, match=r"device.same_processor: dgx-a100 has a card of another name"):
        load("dgx-a100", f"name: X, {same}")
    for link in ("name: EFA", "bandwidth_bytes_per_s: {value: 40.0e9, source: s}"):
        reached = load("b200-sxm", "", f"node_link: {{{link}}}").node_link.collectives["any"]  # type: ignore[union-attr]
        assert reached[0].bandwidth_bytes_per_s.substitute == "b200-sxm's"


def _attention(cluster: Cluster) -> Any:
    return cluster.device.attention.kernels["flash_attention_2"][0].limit_flops_per_s


def test_cells_that_name_no_attention_kernel_have_the_usual_one(tmp_path: Path) -> None:
    group = "{model: llama3-8b, strategy: single, cluster: dgx-h100, precision: bf16, batch: 1, seq_len: 64}"
    for more, clusters, kernel in (
        ("", (), "cudnn"),
        ("", ("dgx-a100",), None),  # whose usual kernel is its file's default
        ("unsaid_attention: file", (), None),
        ("defaults: {model_options: {attention: flash}}", (), "flash"),
    ):
        scenario = load_scenario(write(tmp_path, f"title: t\ngroups: [{group}]\n{more}"))
        for choose in (Narrowing.declared, Narrowing.cells):
            (cell,) = choose(Narrowing(clusters=clusters), scenario)
            assert cell.model_options.get("attention") == kernel
        (cell,) = Narrowing(changes=[("cluster", "dgx-a100")]).cells(scenario)
        assert cell.model_options.get("attention") in (None, "flash")


def test_a_copied_cluster_file_loads_under_any_name(tmp_path: Path) -> None:
    for name, path in packaged("spbench.scenarios.clusters").items():
        copy = load_cluster(write(tmp_path, path.read_text(), f"our-{name}.yaml"))
        assert copy == load_cluster(name).model_copy(update={"name": f"our-{name}"})


RING: dict[str, Any] = {"strategy": "ring_self_attention", "sizes": {"sp": 4}}
GROUPS: list[dict[str, Any]] = [
    {**RING, "sizes": {"dp": 2, "sp": [2, 4]}, "mesh": [["dp", "sp"], ["sp", "dp"]]},
    {"strategy": "tensor_parallel", "sizes": {"dp": 2, "tp": 2}, "mesh": ["tp", "dp"]},
]


def scenario_of(folder: Path, groups: list[dict[str, Any]], **sections: Any) -> Scenario:
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
    of = scenario_of(tmp_path, GROUPS)
    cells = of.cells[""]
    assert [cell.mesh_text for cell in cells] == ["dp2xsp2", "sp2xdp2", "dp2xsp4", "sp4xdp2", "tp2xdp2"]
    assert differing_settings(cells)["mesh"] == [UNSET, "sp dp", "tp dp"]
    assert chosen(of, where=[("mesh", "sp dp")]) == ["sp2xdp2", "sp4xdp2"]
    assert chosen(of, where=[("mesh", UNSET)]) == ["dp2xsp2", "dp2xsp4"]
    with pytest.raises(UserError, match=r"has mesh dp sp; they have: unset, sp dp, tp dp$"):
        chosen(of, where=[("mesh", "dp sp")])
    with pytest.raises(UserError, match=r"unknown setting 'world_size' \(none of \d+ is like it\)$"):
        chosen(of, where=[("world_size", "8")])


def test_a_variant_may_have_an_order(tmp_path: Path) -> None:
    groups = [{**RING, "sizes": {"dp": 2, "sp": 4}}]
    variants = {"inside": {}, "outside": {"mesh": ["sp", "dp"]}}
    of = scenario_of(tmp_path, groups, variants=variants)
    assert chosen(of, variant="all") == ["dp2xsp4", "sp4xdp2"]


def test_sizes_that_are_made_keep_the_order(tmp_path: Path) -> None:
    assert chosen(scenario_of(tmp_path, GROUPS), world_sizes=[16]) == ["dp2xsp8", "sp8xdp2", "tp8xdp2"]
    groups = [{**RING, "sizes": {"dp": 2, "pp": 2}, "mesh": ["pp", "dp"]}]
    (cell,) = Narrowing(world_sizes=[16]).cells(scenario_of(tmp_path, groups))
    assert cell.mesh_text == "pp2xdp2xsp4"
    assert Cell.model_validate(cell.model_dump()) == cell


@tabled(__file__, "a_selector_names_the_order")
def test_a_selector_names_the_order(tmp_path: Path, given: dict[str, Any], selected: list[str]) -> None:
    cells = scenario_of(tmp_path, GROUPS).cells[""]
    assert [cell.mesh_text for cell in Selector.model_validate(given).select(cells)] == selected


def test_as_many_ranks_as_there_can_be() -> None:
    assert Sizes(dp=MOST_RANKS // 2, sp=2).world == MOST_RANKS


VIRTUAL = Cell(model="bert-tiny", strategy="ulysses", sizes=Sizes(sp=4), batch=2, seq_len=24)
REAL = VIRTUAL.model_copy(update={"engine": "distributed"})
EMULATED = VIRTUAL.model_copy(update={"engine": "emulated"})


@tabled(__file__, "real_tensors_are_on_the_device_that_is_there")
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
    row = next(rows)
    assert (row.status, row.reason) == (
        "unsupported",
        "needs 1 GPUs, and this machine has 0; start it with torchrun",
    )
