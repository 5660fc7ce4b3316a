"""`spbench list models`, and what has a text in its name. `spbench flags`: what it writes, and its one line
where a program has not what a cell says. Rates of a cluster by size, against what a simulation of one kernel
or one message takes by hand. The command that writes a trace: which cell it takes, what it says, and its one
line for each mistake. spbench verify: what it asks for, and how its verdicts are shown,
kept in a file, and read from a spoilt one.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scripts.prove import write_summary
from spbench.bench import verdicts
from spbench.bench.command_line.cli import exit_code
from spbench.bench.command_line.drawn_tables import markdown
from spbench.bench.command_line.output import Output, View
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.measure.verify.cases import VerifyRow
from spbench.bench.tools.run.list_command import MESSAGES, attention_curves, link_curves, product_curves
from spbench.bench.tools.run.verify_output import _each, _output, _sections
from spbench.bench.units import shown_time
from spbench.impls.models.huggingface.published import published_models
from spbench.plots import FIGURES
from tests.grid import data, tabled
from tests.measure.simulator.step_programs import cluster
from tests.measure.simulator.test_card_rates import figure
from tests.terminal import faults_of, screen_of
from tests.tools.commands.conftest import Run


def test_models_are_presets_by_size_and_names_by_owner(command_line: Run) -> None:
    out = command_line("list", "models")[1]
    (line,) = [line for line in out.splitlines() if line.startswith("| llama3-8b ")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["32", "4096", "32", "8", "", "128256"]
    owners = {model.name.partition("/")[0] for model in published_models()}
    assert all(f"| {owner} " in out for owner in owners)
    (line,) = [line for line in out.splitlines() if line.startswith("| EleutherAI ")]
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["17", "70.4M to 20.6B", "gpt-neox, pythia"]
    assert "Qwen/Qwen3-30B-A3B" not in out
    assert "spbench list models TEXT" in out


def test_a_text_chooses_by_name(command_line: Run) -> None:
    out = command_line("list", "models", "QWEN3-30b")[1]
    (line,) = [line for line in out.splitlines() if line.startswith("| Qwen/Qwen3-30B-A3B ")]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["Qwen/Qwen3-30B-A3B", "30.5B", "48", "2048", "32", "4", "128", "151936"]
    assert "| qwen3-30b-a3b " in out
    assert "llama" not in out
    chosen = json.loads(command_line("list", "models", "QWEN3-30b", "--format", "json")[1])["models"]
    assert len(chosen) == 5
    assert command_line("list", "clusters", "gb300")[1].count("\n") == 2
    kinds = json.loads(command_line("list", "Ring_Self", "--format", "json")[1])
    assert [*kinds["strategies"]] == ["ring_self_attention"]
    assert set(kinds) == {"strategies"}


@tabled(__file__, "strategies_of_a_model_and_models_of_a_strategy")
def test_strategies_of_a_model_and_models_of_a_strategy(
    of: str, has: list[str], has_not: list[str], command_line: Run
) -> None:
    kind, name = of.split()
    named = json.loads(command_line("list", kind, name, "--format", "json")[1])[kind].keys()
    assert named >= {*has}
    assert named.isdisjoint(has_not)


def test_each_figure_says_what_it_shows() -> None:
    assert [name for name, text in FIGURES.summaries().items() if not text] == []


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run `spbench flags` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("flags.yaml"), "cells.yaml")
    return partial(command_line, "flags", "--scenario", "cells.yaml")


def test_a_file_that_is_imported_as_the_cell(flags: Run, command_line: Run) -> None:
    code, out, _ = flags("torchtitan", "--strategy", "single", "--output", "train.toml")
    assert code == 0
    assert "training.wrap: embedding there, blocks here" in out
    assert "data_parallel_shard_degree = 8\n" in Path("train.toml").read_text()
    code, out, _ = command_line("import", "torchtitan", "train.toml", "--cluster", "dgx-h100")
    assert (code, "backend: zero3 " in out) == (0, True)


def test_every_argument_has_its_setting(flags: Run) -> None:
    code, out, _ = flags("megatron", "--strategy", "single", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert {"argument": "--use-torch-fsdp2", "value": "", "setting": "training.backend"} in found["lines"]
    assert found["text"].startswith(found["content"])
    assert found["missing"] == []


def with_figures(on: Cluster, **changes: dict[str, Any]) -> Cluster:
    document = on.model_dump()
    for section, figures in changes.items():
        document[section] |= figures
    return Cluster.model_validate(document)


def test_products_pay_for_their_operands_and_the_floor() -> None:
    """n = 128: 2 n^3 FLOPs at half of 1000 a second, and 3 x 4 n^2 bytes at 100 a second."""
    matmuls = {"fp32": {"share": figure(0.5), "bandwidth_bytes_per_s": figure(100.0), "measured": {8: 7.0}}}
    on = with_figures(cluster(rate=1000.0), device={"matmul": matmuls, "kernel_floor_s": figure(1e5)})
    (curve,) = product_curves(on)
    flops, nbytes = 2 * 128**3, 12 * 128**2
    assert (curve.panel, curve.name, curve.measured) == ("Matmuls", "fp32", {8: 7.0})
    assert curve.rates[0] == flops / 1e5  # of 8389 + 1966 seconds, which are less than the floor
    assert curve.rates[2] == pytest.approx(64 * flops / (64 * flops / 500 + 16 * nbytes / 100))


def test_attention_has_a_line_a_rate() -> None:
    rate = {"head_size": 64, "mask": "causal", "limit_flops_per_s": figure(90.0), "half_length": figure(512)}
    known = {"default": "triton", "kernels": {"triton": [rate, {**rate, "direction": "backward"}]}}
    both, backward = attention_curves(with_figures(cluster(), device={"attention": known}))
    assert (both.panel, both.name, backward.name) == (
        "Attention, triton",
        "64, causal, both",
        "64, causal, backward",
    )
    assert both.rates[:2] == [45.0, 60.0]


def test_links_within_a_node_and_between() -> None:
    """A ring's bus bandwidth is its hop's, but for the latencies of 6 hops of an all-reduce of 4 ranks."""
    on = cluster(devices=4, nics=4, node_bandwidth=1e9, node_latency=1e-6, bandwidth=1e8, latency=1e-5)
    curves = {
        (curve.panel, curve.name): dict(zip(curve.sizes, curve.rates, strict=True))
        for curve in link_curves(on)
    }
    assert [name for panel, name in curves if panel == "On two nodes"] == [
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    ]
    assert [name for panel, name in curves if panel == "All-reduce by ranks"] == [
        *("2 ranks", "4 ranks", "2 nodes", "4 nodes", "16 nodes", "64 nodes")
    ]
    size = MESSAGES[-1]
    wire = 1.5 * size
    assert curves["Within a node", "all_reduce"][size] == pytest.approx(wire / (wire / 1e9 + 6e-6))
    assert curves["Within a node", "send"][size] == pytest.approx(size / (size / 1e9 + 1e-6))
    # four devices of a node send at once, each by a card
    assert curves["On two nodes", "send"][size] == pytest.approx(size / (size / 1e8 + 1e-5))


def test_a_link_that_is_not_known_has_no_line() -> None:
    unknown = with_figures(
        cluster(devices=1), network={"bandwidth_bytes_per_s": {"value": None, "source": ""}}
    )
    assert [*link_curves(unknown)] == []


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run `spbench trace` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("traced.yaml"), "cells.yaml")
    return partial(command_line, "trace", "--scenario", "cells.yaml")


def processes(path: str) -> set[int]:
    return {event["pid"] for event in json.loads(Path(path).read_text())["traceEvents"]}


def test_the_cell_that_is_left_is_written(trace: Run) -> None:
    code, out, err = trace("--strategy", "ring_self_attention", "--batch", "6", "--output", "new/ring.json")
    assert (code, err.splitlines()[0].split("/")[1:5]) == (0, ["ring_self_attention", "sp2", "b6", "L24"])
    content = json.loads(Path("new/ring.json").read_text())
    names = {(event["name"], event["cat"]) for event in content["traceEvents"] if event["ph"] == "X"}
    assert {("bmm", "compute"), ("send", "communication"), ("all_reduce", "communication")} <= names
    assert {("forward", "phase"), ("optimizer", "phase")} <= names
    assert content["otherData"]["world_size"] == 2
    breakdown, parts, rests, where, _, title, *table = out.splitlines()
    assert rests.startswith("priced by something else, with shares of the step: ")
    assert "all_reduce inter-node" in rests
    assert ": the bandwidth of a send" in rests
    step = shown_time(content["otherData"]["step_time_s"])
    assert re.match(rf"step time {step} \S+.*, most of it [a-z -]+; mean over ranks: ", breakdown)
    assert all(f"{part} " in parts for part in ("matmul", "attention", "memory-bound", "inter-node links"))
    assert all(part in breakdown for part in ("compute", "exposed communication", "bubble", "overhead"))
    assert where == "new/ring.json: open it in https://ui.perfetto.dev"
    assert title == "Memory of each rank class at each step, of 15.07 GiB"
    assert [cell.strip() for cell in table[2].split("|")[1:5]] == ["0", "2", "0", "yes"]  # set-up


def test_ranks_are_those_asked_for_or_the_first_of_each_stage(trace: Run) -> None:
    chosen = ("--strategy", "tensor_parallel")
    assert trace(*chosen)[0] == 0
    assert processes("trace.json") == {0, 2}
    assert trace(*chosen, "--ranks", "1,0")[0] == 0
    assert processes("trace.json") == {0, 1}


def test_settings_choose_between_cells_that_are_otherwise_alike(trace: Run) -> None:
    groups = "groups:\n  - {strategy: single, training: {backend: zero1}, model_options: {dropout: 0.0}}\n"
    groups += "  - {strategy: single, training: {backend: ddp}}\n"
    Path("cells.yaml").write_text(Path("cells.yaml").read_text().replace("groups:\n", groups))
    chosen = ("--strategy", "single", "--format", "json")
    code, _, err = trace(*chosen)
    assert code == 2
    assert err.endswith(
        "they differ in model_options.dropout (0.0, unset), training.backend (zero1, ddp): "
        "choose with --where SETTING=VALUE\n"
    )
    records = [
        json.loads(trace(*chosen, "--where", where)[1])
        for where in ("training.backend=zero1", "training.backend=ddp", "model_options.dropout=unset")
    ]
    keys = [record["cell"] for record in records]
    assert keys[0] != keys[1] == keys[2]
    assert records[0]["file"] == "trace.json"


def test_a_search_is_traced_at_the_value_given(trace: Run) -> None:
    chosen = ("--variant", "searched", "--strategy", "tensor_parallel")
    code, _, err = trace(*chosen)
    assert code == 2
    assert "searches for its seq_len: give one, --seq-len N" in err
    code, _, err = trace(*chosen, "--seq-len", "48")
    assert code == 0
    assert "/L48/" in err


def test_a_step_that_does_not_fit_is_timed_with_a_warning(trace: Run) -> None:
    code, out, err = trace("--variant", "huge", "--strategy", "tensor_parallel")
    assert code == 0
    assert "warning: timed as if it fitted the card, which has no room for " in err
    fits = [line.split("|")[5].strip() for line in out.splitlines()[-4:]]
    assert fits == ["yes", "no"] * 2  # set-up and step of two stages
    assert out.startswith("step time ")


def test_only_the_first_cells_are_named(trace: Run) -> None:
    assert trace("--variant", "all")[2].count("bert-tiny/") == 3


def row(status: Any, error: float | None, **further: Any) -> VerifyRow:
    rank, limit = (None, None) if error is None else (1, 1e-10)
    numbers: dict[str, Any] = {"error": error, "limit": limit, "rank": rank, "tensor": "weight"}
    cell: dict[str, Any] = {
        "strategy": "tensor_parallel",
        "model": "bert-tiny",
        "part": "bert",
        "size": 2,
        "mesh": "tp2",
    }
    return VerifyRow(**cell, dtype="fp64", batch=3, seq_len=24, status=status, **numbers, **further)


def test_verify(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    green = row("green", 1.5e-14)
    asked: list[Any] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def found(*rows: VerifyRow) -> None:
        def verify(*arguments: Any, **options: Any) -> Iterator[VerifyRow]:
            options.pop("expect")(len(rows))
            asked.append((*arguments, options))
            return iter(rows)

        monkeypatch.setattr("spbench.bench.measure.verify_cases", verify)

    found(green, replace(green, status="unsupported", error=None, limit=None, rank=None))
    code, out, err = spbench(
        "verify", "--strategy", "tensor_parallel", "--world-size", "2", "--dtype", "fp64,fp32"
    )
    default = {"backend": "legacy_ddp", "device": "cpu", "options": {}, "backend_options": {}, "explain": 1}
    default["model_options"] = {}
    assert asked == [(["tensor_parallel"], None, [2], ["fp64", "fp32"], None, default)]
    assert (code, "1.5e-14" in out, out.splitlines()[-1]) == (0, True, "1 green, 1 unsupported")
    assert "tensor_parallel bert-tiny bert N=2 fp64: green" in err
    assert "| tensor_parallel | fp64  |     1 |           1 | 1.5e-14           | 1.0e-10 |" in out
    wrong = replace(green, status="RED", error=float("inf"), verdict="so many words " * 20)
    found(green, wrong, wrong)
    code, out, _ = spbench("verify")
    assert (code, out.count("(1)")) == (1, 5)  # like cases together, and each
    assert asked[-1] == (None, None, [1, 2, 3, 4], ["fp64"], None, default)
    assert spbench("verify", "--backend", "ddp")[0] == 1
    assert asked[-1][-1] == default | {"backend": "ddp"}
    settings = "model_options.dropout=0.5,strategy_options.pad_heads=true,training.optimizer=host"
    named = ("--model", "bert-tiny", "--strategy", "ulysses", "--backend", "zero1")
    assert spbench("verify", *named, "--set", settings)[0] == 1
    of_all = {"model_options": {"dropout": 0.5}, "options": {"pad_heads": True}}
    assert asked[-1][-1] == default | of_all | {"backend": "zero1", "backend_options": {"optimizer": "host"}}
    assert spbench("verify", "--pairs")[0] == 1
    assert {"megatron_sp+ulysses", "ulysses+ring_attention"} <= set(asked[-1][0])
    assert asked[-1][2] == [4]
    assert json.loads(spbench("verify", "--format", "json")[1])[1]["error"] is None
    found()
    assert spbench("verify")[1].splitlines()[-1] == "nothing to verify"


def test_a_pipe_has_the_whole_variant() -> None:
    variant = " ".join(f"option_{n}=value" for n in range(9))
    (table,) = _each([asdict(replace(row("green", 1e-14), variant=variant))])
    assert f"| {variant} |" in markdown(table)  # type: ignore[arg-type]


def test_a_terminal_shows_what_is_wrong_and_counts_the_rest() -> None:
    right = row("green", 1e-14)
    wrong = row("RED", 0.5, verdict="off by 5.0e-01, not a scale; wrong too: " + "output y, " * 20)
    refused = row("unsupported", None, reason="3 heads cannot be divided")
    rows = [asdict(each) for each in (*[right] * 40, wrong, refused)]
    shown = Output(_sections(rows), details=_each(rows))
    assert faults_of(shown, most_lines=26) == []
    text = screen_of(shown, 80)
    assert ("RED" in text, "off by 5.0e-01" in text, "cannot be divided" in text) == (True, True, False)
    assert "cannot be divided" in screen_of(shown, 80, View(details=True))
    alike = [asdict(replace(wrong, variant=f"option={n}", explanation="of the sum")) for n in range(12)]
    first = screen_of(_output([*rows, *alike], [], []), 80).splitlines()
    assert (first[0], len(first) < 30) == ("tensor_parallel wrong: 13 of 54 cases are RED", True)
    assert first[2].startswith("Where it goes wrong, tensor_parallel")
    refusals = [asdict(replace(refused, reason=f"reason {n % 5}")) for n in range(170)]
    whole = screen_of(_output(refusals, [], []), 80, View(details=True))
    assert ("(5) reason 4" in whole, len(whole.splitlines()) < 30) == (True, True)
    many = _output([asdict(replace(wrong, verdict=f"tensor {n} is off")) for n in range(9)], [], [])
    shorter, whole = (screen_of(many, 80, view) for view in (None, View(details=True)))
    assert [
        "(2) tensor 1 is off" in shorter,
        "tensor 2 is off" in shorter,
        "(9) tensor 8 is off" in whole,
    ] == [
        True,
        False,
        True,
    ]


GREEN = verdicts.VerifyRow(**data(__file__)["GREEN"])
RED = replace(GREEN, part="model", status="RED", error=0.5, verdict="is 0.5 times the reference")
MADE = data(__file__)["MADE"]


def keep(folder: Path, *rows: verdicts.VerifyRow, **made: str) -> None:
    with verdicts.kept_verdicts(folder, MADE | made) as found:
        found += map(asdict, rows)


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    refused = replace(GREEN, size=3, status="unsupported", error=None, rank=None, tensor="", reason="odd")
    keep(tmp_path, GREEN, RED, refused)
    found = verdicts.read_verdicts(tmp_path)
    assert found == [asdict(row) | MADE for row in (GREEN, refused, RED)]
    lines = (tmp_path / verdicts.VERDICTS_FILE).read_text().splitlines()
    assert json.loads(lines[0]) == MADE
    assert all("commit" not in line and "null" not in line for line in lines[1:])
    assert verdicts.read_verdicts(tmp_path / "elsewhere") == []


def test_a_later_verdict_takes_the_place_of_an_earlier_one_on_its_case(tmp_path: Path) -> None:
    keep(tmp_path, GREEN, RED)
    keep(tmp_path, replace(RED, status="green", error=1e-15), commit="def")
    keep(tmp_path, RED, backend="zero1")
    found = {
        (row["part"], row["backend"]): (row["status"], row["commit"])
        for row in verdicts.read_verdicts(tmp_path)
    }
    assert found == {
        ("block", "ddp"): ("green", "abc"),
        ("model", "ddp"): ("green", "def"),
        ("model", "zero1"): ("RED", "abc"),
    }


def test_what_was_verified_before_an_error_is_kept(tmp_path: Path) -> None:
    def interrupted() -> None:
        with verdicts.kept_verdicts(tmp_path, MADE) as found:
            found.append(asdict(GREEN))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(verdicts.read_verdicts(tmp_path)) == 1


@pytest.mark.parametrize("line", ["{", "[]", '{"status": "green"}', '{"strategy": "lasp"}'])
def test_a_spoilt_file_is_refused_and_stays(tmp_path: Path, line: str) -> None:
    (tmp_path / verdicts.VERDICTS_FILE).write_text(line + "\n")
    with pytest.raises(UserError, match=rf"{verdicts.VERDICTS_FILE}:1: not a verdict"):
        keep(tmp_path, GREEN)
    assert (tmp_path / verdicts.VERDICTS_FILE).read_text() == line + "\n"


def test_the_command_keeps_its_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(*arguments: Any, **options: Any) -> Iterator[verdicts.VerifyRow]:
        options["expect"](2)
        yield GREEN
        yield replace(RED, error=float("inf"))

    monkeypatch.setattr("spbench.bench.measure.verify_cases", verify)
    assert exit_code(["verify", "--backend", "zero1", "--device", "cpu", "--output", str(tmp_path)]) == 1
    assert str(tmp_path / verdicts.VERDICTS_FILE) in capsys.readouterr().out
    found = verdicts.read_verdicts(tmp_path)
    assert [(row["status"], row["error"], row["backend"]) for row in found] == [
        ("green", 1.5e-14, "zero1"),
        ("RED", None, "zero1"),
    ]
    assert {row["code"] for row in found} == {verdicts.verified_code()}
    assert all(row["time"] and row["torch"] for row in found)


def test_no_committed_verdict_is_red() -> None:
    found = verdicts.read_verdicts(Path(__file__).parents[3] / "results" / "verification")
    assert {row["strategy"] for row in found if row["status"] == "green"} >= {"lasp", "dsp", "ulysses"}
    assert [row for row in found if row["status"] == "RED"] == []


def test_a_summary_counts_cases_and_keeps_each_red_one(tmp_path: Path) -> None:
    worse = replace(GREEN, size=4, variant="heads=3", error=2.04567e-14, mesh="sp4")
    refused = [replace(GREEN, size=n, status="unsupported", error=None, reason="odd") for n in (3, 5)]
    rows = [asdict(row) | MADE for row in (GREEN, worse, RED, replace(RED, size=8), *refused)]
    write_summary(tmp_path, rows)
    found = {(row["status"], row["size"]): row for row in verdicts.read_verdicts(tmp_path)}
    cases = {("green", 4): 2, ("RED", 2): 1, ("RED", 8): 1, ("unsupported", 5): 2}
    assert {key: row["cases"] for key, row in found.items()} == cases
    assert (found["green", 4]["error"], found["green", 4]["mesh"]) == (2.05e-14, "sp4")
    assert found["green", 4].items() >= MADE.items()


def test_a_summary_renews_the_strategies_that_were_verified(tmp_path: Path) -> None:
    pair = replace(GREEN, strategy="tensor_parallel+lasp")
    write_summary(tmp_path, [asdict(row) | MADE for row in (GREEN, pair)])
    write_summary(tmp_path, [asdict(replace(GREEN, error=0.0)) | MADE | {"code": "new"}])
    found = {row["strategy"]: (row["code"], row["cases"]) for row in verdicts.read_verdicts(tmp_path)}
    assert found == {pair.strategy: (MADE["code"], 1), GREEN.strategy: ("new", 1)}


def test_verdicts_of_all_cases_are_read_in_the_place_of_a_summary(tmp_path: Path) -> None:
    write_summary(tmp_path, [asdict(GREEN) | MADE])
    keep(tmp_path, RED)
    assert [row["status"] for row in verdicts.read_verdicts(tmp_path)] == ["RED"]
