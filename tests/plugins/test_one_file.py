"""An addition of each kind is one file, written against the public API: a plug-in, or a file of the package.

The examples are used together by one scenario, which is itself an addition: a file given by its path, as is
its cluster.
"""

import ast
from typing import Any

import pytest
import yaml

import spbench
from tests.grid import data
from tests.plugins.additions import ADDITIONS, EXAMPLES, Addition, Installation, with_additions
from tests.slow import slow

SCENARIO = data(__file__)["SCENARIO"]
CARD_BYTES = 2**26
CLUSTER = f"""
about: a card of 64 MiB without rates
extends: local
device: {{memory_total_bytes: {{value: {CARD_BYTES}, source: chosen}}}}
"""
BOUNDS = "claim,published\ntwo megabytes,2097152\n"

NAMES = data(__file__)["NAMES"]

Rows = dict[tuple[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module", params=[slow("copy")])
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    made = with_additions(tmp_path_factory.mktemp("additions"))
    (made.folder / "added.yaml").write_text(SCENARIO)
    (made.folder / "card.yaml").write_text(CLUSTER)
    (made.folder / "bounds.csv").write_text(BOUNDS)
    return made


@pytest.fixture(scope="module")
def report(installation: Installation) -> dict[str, Any]:
    """What `spbench run` prints of the scenario in the form that was added."""
    done = installation.spbench("run", "--scenario", "added.yaml", "--output", "rows", "--format", "yaml")
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = yaml.safe_load(done.stdout)
    return content


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> Rows:
    """The rows by model, strategy and engine."""
    cells = [(row["cell"], row) for row in report["rows"]]
    return {(cell["model"], cell["strategy"], cell["engine"]): row for cell, row in cells}


@pytest.mark.parametrize("addition", [each for each in ADDITIONS if each.file.endswith(".py")], ids=str)
def test_it_is_written_against_the_public_api(addition: Addition) -> None:
    for node in ast.walk(ast.parse((EXAMPLES / addition.file).read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith(("spbench", "tests"))
        if isinstance(node, ast.Import):
            assert all(alias.name == "spbench" or "spbench" not in alias.name for alias in node.names)


def test_a_strategy_and_a_model(rows: Rows) -> None:
    row = rows["one-layer-lm-tiny", "gathered_attention", "virtual"]
    measured = row["measurement"]
    # keys and values [2, 12, 24, 4] in float32, of which a rank of two has half
    payload = 2 * 12 * 24 * 4 * 4
    sent = {(entry["phase"], entry["collective"]): entry["sent_bytes"] for entry in measured["communication"]}
    assert row["status"] == "ok"
    assert sent["forward", "all_gather"] == sent["backward", "reduce_scatter"] == 2 * payload / 2
    assert measured["formula_difference"] == []


def test_a_strategy_within_another(rows: Rows) -> None:
    row = rows["one-layer-lm-tiny", "tensor_parallel+gathered_attention", "virtual"]
    measured = row["measurement"]
    payload = 2 * (12 // 2) * 24 * 4 * 4  # of the heads of a rank
    sent = {(e["axis"], e["phase"], e["collective"]): e["sent_bytes"] for e in measured["communication"]}
    assert row["status"] == "ok"
    assert sent["sp", "forward", "all_gather"] == 2 * payload / 2
    assert measured["formula_difference"] == []


def test_a_kind_of_feed_forward_block(rows: Rows) -> None:
    row = rows["two-step-lm-tiny", "megatron_sp", "virtual"]
    assert row["status"] == "ok"
    assert row["measurement"]["formula_difference"] == []


def test_an_axis_of_the_mesh(rows: Rows) -> None:
    row = rows["one-layer-lm-tiny", "tensor_parallel+gathered_over_gp", "virtual"]
    assert row["status"] == "ok"
    assert {e["axis"] for e in row["measurement"]["communication"]} >= {"gp", "tp"}
    assert row["measurement"]["formula_difference"] == []


def test_a_backend_over_a_part_of_the_replicas(rows: Rows) -> None:
    row = rows["bert-tiny", "ulysses", "virtual"]
    assert row["status"] == "ok"
    assert row["measurement"]["formula_difference"] == []


def test_virtual_and_real_ranks_agree(rows: Rows) -> None:
    virtual = rows["one-layer-lm-tiny", "gathered_attention", "virtual"]
    real = rows["one-layer-lm-tiny", "gathered_attention", "distributed"]
    for name in ("peak_memory_bytes", "communication", "meters"):
        assert real["measurement"][name] == virtual["measurement"][name]


def test_a_strategy_and_a_model_are_verified(installation: Installation) -> None:
    names = ("--strategy", "gathered_attention", "--model", "one-layer-lm-tiny", "--model", "bert-tiny")
    done = installation.spbench("verify", *names, "--world-size", "2", "--format", "yaml")
    cases = yaml.safe_load(done.stdout)
    assert done.returncode == 0, done.stderr
    # its example has no attention by way of all scores
    assert {case["status"] for case in cases} <= {"green", "unsupported"}
    assert {case["model"] for case in cases if case["status"] == "green"} == {
        "one-layer-lm-tiny",
        "bert-tiny",
    }


def test_a_backend(rows: Rows) -> None:
    measured = rows["bert-tiny", "single", "virtual"]["measurement"]
    (entry,) = {(e["phase"], e["collective"]) for e in measured["communication"]}
    assert entry == ("gradient_sync", "all_reduce")
    # one for each parameter
    assert sum(e["count"] for e in measured["communication"]) > 20


def test_an_engine(rows: Rows) -> None:
    closed = rows["bert-tiny", "tensor_parallel", "closed_form"]["measurement"]
    traced = rows["bert-tiny", "tensor_parallel", "virtual"]["measurement"]
    assert closed["communication"] == closed["formula"] == traced["formula"]
    assert closed["peak_memory_bytes"] is None


def test_a_meter(rows: Rows) -> None:
    found = rows["one-layer-lm-tiny", "gathered_attention", "virtual"]["measurement"]["meters"]
    tokens, hidden, vocabulary = 2 * 12, 48, 96
    products = tokens * hidden * (4 * hidden + vocabulary)
    # an add and a multiply, forward and twice backward
    assert found == {"flops": {"flops": 6 * products, "flops_by_operator": {"aten.mm": 6 * products}}}


def test_what_a_meter_found_has_a_column(installation: Installation, rows: Rows) -> None:
    assert spbench.read_results(installation.folder / "rows")["flops.flops"].max() == 1990656


def test_a_searched_quantity(rows: Rows) -> None:
    row = next(row for row in rows.values() if row["cell"]["search"])
    measured = row["measurement"]
    fits, too_large = (probe for probe in measured["proof"] if probe["value"] - measured["answer"] in (0, 64))
    assert measured["answer"] % 64 == 0
    assert fits["reserved_memory_bytes"] <= CARD_BYTES
    assert (fits["status"], too_large["status"]) == ("ok", "oom")


def test_an_answer(report: dict[str, Any]) -> None:
    (compared,) = report["comparison"]
    assert (compared["claim"], compared["published"], compared["note"]) == ("two megabytes", 2**21, "within")


def test_an_export(installation: Installation, rows: Rows) -> None:
    done = installation.spbench("export", "--to", "influx", "rows")
    row = rows["one-layer-lm-tiny", "gathered_attention", "virtual"]
    peak = row["measurement"]["peak_memory_bytes"]
    line = f"peak_memory_bytes,suite=rows,cell={row['key']} value={peak}"
    assert line in done.stdout.splitlines(), done.stderr


def test_a_log(installation: Installation) -> None:
    # 10 us and 1 GB/s
    rows = "".join(f"{size} {10 + size / 1e3:.2f}\n" for size in (10, 1000, 100000))
    (installation.folder / "latency.txt").write_text(f"# OSU MPI Latency Test\n{rows}")
    done = installation.spbench("calibrate", "--from", "latency.txt", "--format", "csv")
    assert "node_link: latency_s,1e-05," in done.stdout, done.stderr
    assert "node_link: bandwidth_bytes_per_s,1e+09," in done.stdout


def test_a_job(installation: Installation) -> None:
    (installation.folder / "job.txt").write_text("tp=4 batch=8 seq_len=128\n")
    done = installation.spbench("import", "sizes", "job.txt", "--cluster", "dgx-a100")
    content = yaml.safe_load(done.stdout)
    assert content["groups"][0]["sizes"] == {"tp": 4}, done.stderr


def test_a_job_by_a_table(installation: Installation) -> None:
    keys = "model: Qwen/Qwen3-8B, tokens: 4096, learning_rate: 1.0e-5, recompute: true"
    (installation.folder / "job.yaml").write_text(f"plain_trainer: {{{keys}}}\n")
    job = "job.yaml", "--gpus", "8", "--cluster", "dgx-h100"
    done = installation.spbench("import", *job)
    (group,) = yaml.safe_load(done.stdout)["groups"]
    assert (group["model"], group["seq_len"], group["batch"]) == ("Qwen/Qwen3-8B", 4096, 8), done.stderr
    assert group["model_options"]["recompute"] == "full"
    done = installation.spbench("import", *job, "--given", "plain_trainer.pictures=true")
    assert "pictures among the words: not modelled" in done.stderr


def test_flags(installation: Installation) -> None:
    group = "{model: bert-base, strategy: tensor_parallel, sizes: {tp: 4}, batch: 8, seq_len: 128}"
    (installation.folder / "line.yaml").write_text(f"title: A line\ngroups: [{group}]\n")
    done = installation.spbench("flags", "sizes", "--scenario", "line.yaml")
    assert done.stdout == "tp=4 batch=8 seq_len=128\n", done.stderr
    done = installation.spbench("flags", "sizes", "--scenario", "line.yaml", "--set", "precision=fp16")
    assert done.stderr.splitlines()[-1] == "spbench: sizes has no precision fp16 (it has fp32)"


def test_a_command(installation: Installation, rows: Rows) -> None:
    assert "peaks      Show the largest peak memory of each strategy" in installation.spbench("--help").stdout
    done = installation.spbench("peaks", "rows", "--format", "csv")
    assert "tensor_parallel," in done.stdout, done.stderr


def test_a_figure(installation: Installation, report: dict[str, Any]) -> None:
    assert report["files"][-1] == "rows/peak_bars.svg"
    assert "Peak memory, MiB" in (installation.folder / "rows/peak_bars.svg").read_text()


def test_all_are_listed(installation: Installation) -> None:
    done = installation.spbench("list", "--format", "yaml")
    listed = yaml.safe_load(done.stdout)
    assert {kind for kind, name in NAMES if name in listed[kind]} == {kind for kind, _ in NAMES}
