"""`spbench export`: what is written where, and one line for each thing that a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.command_line.forms import as_table
from spbench.bench.command_line.output import Output
from tests.bench.hosts import files_of_at_most
from tests.terminal import screen_of
from tests.tools.changes.rows import BASE, commit_all, folder, made_up, planted
from tests.tools.commands.conftest import Run


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


def test_annotations_are_commands_of_a_workflow(tmp_path: Path, command_line: Run) -> None:
    rows = planted(lambda rows: rows[0]["measurement"].update(peak_memory_bytes=2**34))
    rows[1]["status"], rows[1]["key"] = "failed", "50%,\n:b"
    new, base = folder(tmp_path / "n" / "suite", rows), folder(tmp_path / "b" / "suite", BASE)
    out = command_line("export", "--to", "github-annotations", str(new), "--base", str(base))[1]
    *errors, _, last = out.splitlines()
    assert [line.partition("::tensor")[0] for line in errors] == [
        "::error title=suite%3A worse%2C peak memory",
        "::error title=suite%3A missing%2C cell",
    ]
    assert "14.4 GiB -> 16.0 GiB (+10.8%25); a" in errors[0]
    assert "50%25,%0A:b" in out
    assert last.startswith("::notice title=suite::worse: 1 worse, 1 missing, 1 new")


def test_prometheus_has_the_samples_of_a_metric_together(tmp_path: Path, command_line: Run) -> None:
    rows = [made_up("a"), made_up('b"\\'), made_up("c", "failed")]
    code, out, err = command_line("export", "--to", "prometheus", str(folder(tmp_path / "suite", rows)))
    assert (code, "left out 1 cells" in err) == (0, True)
    lines = out.splitlines()
    at = lines.index("# TYPE spbench_peak_memory_bytes gauge")
    of = 'unit="bytes",model="bert-tiny",strategy="tensor_parallel",cluster="piz-daint-p100",engine="virtual"'
    assert lines[at + 1 : at + 3] == [
        f'spbench_peak_memory_bytes{{suite="suite",cell="{key}",{of}}} 15509396481' for key in ("a", r"b\"\\")
    ]
    assert (lines[-1], len(set(lines))) == ("# EOF", len(lines))


def test_a_terminal_breaks_no_line_of_another_system(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Output] = []
    monkeypatch.setattr(as_table, "show", lambda output, *streams: shown.append(output))
    assert exit_code(("export", "--to", "hud", str(results))) == 0
    assert max(map(len, screen_of(shown[0], 80).splitlines())) > 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--to", "junti", "suite"),
            "no export 'junti'; did you mean 'junit'? (choices: asv, github-action, ",
        ),
        (("--to", "junit"), "Missing argument 'RESULTS...'"),
        (("--to", "junit", "absent"), "cannot read absent: no such file"),
        (("--to", "junit", "suite", "other/suite"), "suite and other/suite are both called 'suite'; rename"),
        (("--to", "junit", "suite", "--base", "nowhere"), "cannot read nowhere: no such file"),
        (("--to", "markdown", "suite", "third", "--base", "bases"), "cannot read bases/third: no such file"),
        (
            ("--to", "markdown", "suite", "--base", "suite", "--previous-base", "nowhere"),
            "cannot read nowhere",
        ),
        (("--to", "hud", "bare"), "nothing to export: bare: left out 1 cells without a value: 1 unsupported"),
        (("--to", "pytest-benchmark", "bare"), "left out 1 cells without a step_time_s or time_s: 1"),
        (("--to", "github-action", "suite"), "github-action is several files (customSmallerIsBetter.json, "),
        (("--to", "github-annotations", "suite"), "suite: annotations say what differs; give --base"),
        (("--to", "asv", "suite", "--output", "o"), "git knows no commit 0123456789ab here; export in the"),
        (("--to", "asv", "suite", "--commit", "123", "--output", "o"), "git knows no commit 123 here"),
        (("--to", "junit", "suite", "--output", "file/below"), "cannot write file/below: "),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command_line: Run,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("suite", "other/suite", "third", "bases/suite"):
        folder(Path(name), BASE)
    folder(Path("bare"), [made_up("a", "unsupported")])
    Path("file").write_text("")
    before = sorted(Path().rglob("*"))
    code, out, err = command_line("export", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert sorted(Path().rglob("*")) == before


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
