"""`spbench export`: what is written where; asv and pytest-benchmark read what is exported for them. What
exports, the gate and histories print of made-up results.
"""

import copy
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.command_line.forms import as_table
from spbench.bench.command_line.output import Output
from tests.bench.hosts import files_of_at_most
from tests.grid import data
from tests.terminal import screen_of
from tests.tools.changes.records import MACHINE, OTHER, Cell, cell, commit, nightly
from tests.tools.changes.rows import (
    BASE,
    CLAIM,
    ENTRY,
    EVERYTHING,
    SAMPLES,
    TABLE,
    commit_all,
    folder,
    git,
    made_up,
    one_byte_more,
)
from tests.tools.commands.conftest import Run
from tests.tools.texts import hold


def test_one_file_goes_to_standard_output_or_to_a_file(
    results: Path, tmp_path: Path, command_line: Run
) -> None:
    arguments = ("export", "--to", "hud", str(results))
    code, out, err = command_line(*arguments)
    assert (code, err) == (
        0,
        "spbench: everything: left out 3 cells without a value: 1 oom, 1 unsupported, 1 failed\n",
    )
    file = tmp_path / "new" / "hud.json"
    assert command_line(*arguments, "--output", str(file))[0] == 0
    assert file.read_text() == out
    made = json.loads(command_line(*arguments, "--output", str(file), "--format", "json")[1])
    assert made["files"] == [str(file)]
    assert "left out 3 cells" in made["notes"][0]
    assert json.loads(command_line(*arguments, "--format", "json")[1])["text"] == out


def test_a_terminal_breaks_no_line_of_another_system(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Output] = []
    monkeypatch.setattr(as_table, "show", lambda output, *streams: shown.append(output))
    assert exit_code(("export", "--to", "hud", str(results))) == 0
    assert max(map(len, screen_of(shown[0], 80).splitlines())) > 200


def test_an_output_is_written_whole_or_not_at_all(results: Path, tmp_path: Path, command_line: Run) -> None:
    output = tmp_path / "o"
    arguments = ("export", "--to", "github-action", str(results), "--output", str(output))
    assert command_line(*arguments)[0] == 0
    before = {path: path.read_bytes() for path in output.iterdir()}
    (results / "cells.jsonl").open("a").write(json.dumps(made_up("new", peak_memory_bytes=1)) + "\n")
    with files_of_at_most(2000):  # the first of the two finds no room
        code, _, err = command_line(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert {path: path.read_bytes() for path in output.iterdir()} == before


def test_asv_refuses_a_benchmarks_file_that_it_cannot_add_to(tmp_path: Path, command_line: Run) -> None:
    repository = tmp_path / "repository"
    suite = folder(repository / "suite", BASE)
    commit = commit_all(repository)
    for spoilt in ("no JSON", "[]", '{"version": 1}'):
        (tmp_path / "benchmarks.json").write_text(spoilt)
        arguments = ("export", "--to", "asv", str(suite), "--commit", commit, "--output", str(tmp_path))
        code, _, err = command_line(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert f"cannot add to {tmp_path / 'benchmarks.json'}" in err
        assert (tmp_path / "benchmarks.json").read_text() == spoilt


def test_a_committed_file_without_provenance_has_the_commit_that_changed_it_last(
    tmp_path: Path, command_line: Run
) -> None:
    repository = tmp_path / "repository"
    bare = [{**row, "provenance": None} for row in BASE]
    suite = folder(repository / "suite", bare)
    changed = commit_all(repository)
    (repository / "other").write_text("")
    assert commit_all(repository) != changed
    assert f"Commit: {changed[:12]}" in command_line("export", "--to", "markdown", str(suite))[1]
    elsewhere = folder(tmp_path / "elsewhere", bare)
    assert "Commit: unknown" in command_line("export", "--to", "markdown", str(elsewhere))[1]


def test_a_dirty_commit_is_said(tmp_path: Path, command_line: Run) -> None:
    rows = [made_up("a") | {"provenance": {"commit": "0123456789ab-dirty", "host": "here"}}]
    suite = folder(tmp_path / "suite", rows)
    assert "Commit: 0123456789ab-dirty" in command_line("export", "--to", "markdown", str(suite))[1]


def test_results_that_are_read_from_a_file_are_called_after_it(tmp_path: Path, command_line: Run) -> None:
    suite = folder(tmp_path / "suite", BASE)
    (tmp_path / "alone.jsonl").write_text((suite / "cells.jsonl").read_text())
    for path, name in ((suite / "cells.jsonl", "suite"), (tmp_path / "alone.jsonl", "alone")):
        assert f"### {name}: " in command_line("export", "--to", "markdown", str(path))[1]


pytest_benchmark_stats = pytest.importorskip("pytest_benchmark.stats")


def ran(*arguments: str, cwd: Path) -> str:
    """What a module's command prints."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def benchmarks(results: Path, tmp_path: Path, command_line: Run) -> dict[str, dict[str, Any]]:
    code, _, err = command_line(
        "export", "--to", "pytest-benchmark", str(results), "--output", str(tmp_path / "now.json")
    )
    assert code == 0, err
    content = json.loads((tmp_path / "now.json").read_text())
    return {benchmark["name"]: benchmark for benchmark in content["benchmarks"]}


def test_pytest_benchmark_compares_two_exports(
    benchmarks: dict[str, Any], tmp_path: Path, command_line: Run
) -> None:
    slower = folder(tmp_path / "slower" / "everything", [made_up("a/exact", step_time_s=0.5)])
    assert (
        command_line("export", "--to", "pytest-benchmark", str(slower), "--output", str(tmp_path / "b.json"))[
            0
        ]
        == 0
    )
    arguments = ("compare", "now.json", "b.json", "--sort", "name", "--columns", "min,median,rounds")
    table = ran("-m", "pytest_benchmark", *arguments, "--csv", "table", cwd=tmp_path)
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0].split(",")[-3:] == ["min", "median", "rounds"]
    read = {line.split(",")[0]: [float(word) for word in line.split(",")[-3:]] for line in lines[1:]}
    assert read["everything/b/measured"] == [0.125, 0.25, 5]
    assert "a/exact" in table
    exact = sorted(line.split(",")[-2] for line in lines if line.startswith("everything/a/exact"))
    assert [float(word) for word in exact] == [0.25, 0.5]


def test_statistics_are_complete(benchmarks: dict[str, Any]) -> None:
    measured, exact = benchmarks["b/measured"], benchmarks["a/exact"]
    names = {*pytest_benchmark_stats.Stats.fields, "data", "iterations"}
    assert set(measured["stats"]) == set(exact["stats"]) == names
    assert measured["stats"]["data"] == SAMPLES
    assert (exact["stats"]["rounds"], exact["stats"]["stddev"]) == (1, 0)
    assert exact["extra_info"]["peak_memory_bytes"] == 15_509_396_481
    assert set(benchmarks) == {"a/exact", "b/measured"}
    assert measured["params"]["strategy"] == "tensor_parallel"


def test_spbench_compares_and_exports_what_pytest_benchmark_wrote(
    benchmarks: dict[str, Any], tmp_path: Path, command_line: Run
) -> None:
    now = str(tmp_path / "now.json")
    assert command_line("compare", now, now)[0] == 0
    code, out, err = command_line("export", "--to", "hud", now)
    assert code == 0, err
    times = {
        record["benchmark"]["extra_info"]["cell"]: record["metric"]["benchmark_values"]
        for record in json.loads(out)
    }
    assert times == {"everything/a/exact": [0.25], "everything/b/measured": SAMPLES}
    assert json.loads(out)[0]["runners"][0]["name"] == "here"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the real `asv publish` makes of exports of two commits, of which the second is worse and has a
    cell more; beside it lie the repository and the exported results."""
    work = tmp_path_factory.mktemp("asv")
    repository = work / "repository"
    taken = random.Random(7).sample(range(100), 5)
    for peak in (1000, 1001):
        repository.mkdir(exist_ok=True)
        (repository / "file").write_text(str(peak))
        commit = commit_all(repository)
        rows = [
            made_up("cell/1", peak_memory_bytes=peak),
            made_up("cell/2", "unsupported"),
            made_up("cell/3", "failed"),
            made_up("cell/4", engine="distributed", step_time_samples_s=taken, step_time_s=median(taken)),
        ]
        rows += [made_up("cell/5", peak_memory_bytes=7)] if peak > 1000 else []
        for row in rows:
            row["provenance"]["commit"] = commit[:12]
        results = folder(repository / ".git" / "suite", rows)
        assert exit_code(("export", "--to", "asv", str(results), "--output", str(work / "results"))) == 0
    configuration = data(__file__)["ASV"]
    (work / "asv.conf.json").write_text(json.dumps(configuration))
    ran("-m", "asv", "publish", "--no-pull", cwd=work)
    return work / "html"


def graph(site: Path, machine: str, metric: str) -> list[Any]:
    """The points of a benchmark's graph: [revision, [value of each cell]]."""
    name = f"suite.tensor_parallel.{metric}.json"
    points: list[Any] = json.loads(
        (site / "graphs" / "branch-main" / f"machine-{machine}" / name).read_text()
    )
    return points


def test_asv_publishes_our_values(site: Path) -> None:
    index = json.loads((site / "index.json").read_text())
    benchmark = index["benchmarks"]["suite.tensor_parallel.peak_memory_bytes"]
    assert (benchmark["unit"], benchmark["params"]) == ("bytes", [[f"cell/{n}" for n in range(1, 6)]])
    assert graph(site, "any", "peak_memory_bytes") == [
        [0, [1000, None, None, None, None]],
        [1, [1001, None, None, None, 7]],
    ]
    assert graph(site, "here", "peak_memory_bytes")[0] == [0, [None, None, None, 15_509_396_481, None]]
    assert index["benchmarks"]["suite.tensor_parallel.step_time_s"]["unit"] == "seconds"
    assert set(index["machines"]) == {"any", "here"}
    assert index["machines"]["here"]["cpu"] == "A CPU"
    hashes = git(site.parent / "repository", "log", "--reverse", "--format=%H").splitlines()
    assert [index["revision_to_hash"][str(revision)] for revision in (0, 1)] == hashes


def test_asv_keeps_samples_of_measured_cells_with_their_machine(site: Path) -> None:
    machine = site.parent / "results" / "here"
    first = min(path for path in machine.iterdir() if path.name != "machine.json")
    content = json.loads(first.read_text())
    name = "suite.tensor_parallel.step_time_s"
    columns = dict(zip(content["result_columns"], content["results"][name], strict=False))
    (samples,) = columns["samples"]
    assert len(samples) == columns["stats_repeat"][0] == 5
    assert columns["result"] == [median(samples)]
    assert columns["stats_q_25"][0] <= columns["result"][0] <= columns["stats_q_75"][0]
    cells = json.loads((site / "index.json").read_text())["benchmarks"][name]["params"][0]
    assert graph(site, "here", "step_time_s")[0][1][cells.index("cell/4")] == median(samples)


def test_asv_tells_skipped_from_failed(site: Path) -> None:
    path = next((site.parent / "results" / "any").glob("*-suite.json"))
    content = json.loads(path.read_text())
    result = content["results"]["suite.tensor_parallel.peak_memory_bytes"][0]
    assert math.isnan(result[1])  # unsupported
    assert result[2] is None  # failed


TEXTS = Path(__file__).with_name("texts")

COMMANDS = data(__file__)["COMMANDS"]


def night(number: int, generator: random.Random) -> Sequence[Cell]:
    """The fifth sends a byte more, the fourth is longer; from the sixth on a timed cell is slower."""
    timed = [0.1 * (1.5 if number >= 6 else 1) * (1 + 0.001 * place) for place in range(5)]
    return [
        cell("m/lasp/sp4/b1/L2/virtual", sent_bytes=2**30 + (number >= 4), step_time_s=2.0 + (number == 3)),
        cell("m/dsp/sp4/b1/L2/virtual", "oom" if number == 2 else "ok", sent_bytes=64),
        cell("m/dsp/sp4/b1/L2/distributed", exact=False, step_time_s=timed),
    ][: 2 if number == 1 else 3]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder of the commands: results with one of every change, another baseline, nights."""
    monkeypatch.chdir(tmp_path)
    old = [*copy.deepcopy(EVERYTHING), made_up("i/slower"), made_up("gone"), made_up("j|k", "ok")]
    new = [*copy.deepcopy(old[:-2]), made_up("j|k", "failed"), made_up('new "50%",\n:\\')]
    one_byte_more(new)
    new[0]["measurement"]["step_time_s"] = 0.2
    new[1] |= {"status": "oom", "reason": "no room"}
    new[2]["measurement"]["answer"] = 2048
    new[3]["measurement"]["peak_memory_bytes"] += 2**30
    new[7]["measurement"] |= {"step_time_s": 0.26, "rates": "sourced", "bound": "matmul"}
    new[8]["reason"] = "x < y & z | 50%"
    worse = replace(CLAIM, reproduced=2.4, relative_error=0.2)
    folder(Path("old"), old, CLAIM, ENTRY, TABLE)
    folder(Path("new"), new, worse, ENTRY, replace(TABLE, status_reproduced="ok"))
    folder(Path("previous"), [*old[1:], made_up("a/exact", peak_memory_bytes=10**9)], CLAIM, ENTRY, TABLE)
    nightly(Path("nights"), 12, night, (MACHINE, OTHER))
    Path("nights/meant.yaml").write_text(
        f"meant: [{{commit: '{commit(3).short}', reason: more is computed}}]"
    )
    Path("nights/targets.yaml").write_text(
        "targets: [{metric: step_time_s, cell: m/lasp, value: 1.5}, {metric: sent_bytes, value: 1e8}]"
    )


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("places")
def test_the_text_is_the_one_that_was_read(name: str, command_line: Run) -> None:
    code, out, err = command_line(*COMMANDS[name].split())
    files = [f"-- {path.name}\n{path.read_text()}" for path in sorted(Path().glob("out/*"))]
    text = "".join([f"exit code {code}\n", out, *files, f"-- standard error\n{err}" if err else ""])
    hold(TEXTS / name, text)


def test_every_text_is_of_a_command() -> None:
    assert {path.name for path in TEXTS.iterdir()} == {*COMMANDS}
