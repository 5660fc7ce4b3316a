"""Reports: the forms they are printed in, and forms that other distributions add. The times in the table of
a run: three digits, intervals, parts of the step, ties. The table of memory by rank class and step: which
fits, how much it takes, and what holds it.
"""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell, Learning
from spbench.bench.command_line.drawn_tables import markdown
from spbench.bench.command_line.forms import FORMS
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.record_forms import TIE, flat_rows, memory_table
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.measure.trust.bands import packaged_model
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.tools.run.run_output import result_table, verdict
from spbench.bench.units import shown_time
from spbench.impls.discovery import DiscoveryError
from spbench.impls.registries import model_preset
from tests.cells import make_cell
from tests.terminal import faults_of, screen_of
from tests.tools.commands.conftest import Run

ROOT = Path(__file__).parents[3]
OUTPUT = Output(
    ["a paragraph", Table("A title", [{"name": "a", "number": "1.5", "none": None}])],
    {"all": [1, None]},
    [{"name": "a", "number": 1.5}, {"name": "b,c", "other": True, "number": None}],
    notes=["a note"],
    files=[Path("a/file")],
)
#: a form that another distribution might have: tab-separated values
TSV = """
def show(output, out, err):
    for record in output.records:
        print(*record.values(), sep="\\t", file=out)
"""


def shown(form: str, output: Output) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    FORMS.load(form)(output, out, err)
    return out.getvalue(), err.getvalue()


def test_each_form_prints_its_part_of_a_report() -> None:
    asides = "a note\na/file\n"
    assert shown("json", OUTPUT) == ('{\n "all": [\n  1,\n  null\n ]\n}\n', asides)
    assert shown("csv", OUTPUT) == ('name,number,other\na,1.5,\n"b,c",,True\n', asides)
    assert shown("table", OUTPUT) == (
        "a paragraph\n\n"
        "A title\n| name | number |\n|------|--------|\n| a    |    1.5 |\n\n"
        "a/file\n\na note\n",
        "",
    )


def test_an_empty_report() -> None:
    assert shown("table", Output()) == ("", "")
    assert shown("csv", Output(columns=("a", "b"))) == ("a,b\n", "")


def test_no_cell_of_csv_is_a_formula() -> None:
    texts = ["=1+1", "+cmd", "-a", "@x", "\tb", "-5.1%", "-12", "-0.5", "a=b", ""]
    shown_text, _ = shown("csv", Output(records=[{"text": text, "number": -1.5} for text in texts]))
    lines = [line.split(",") for line in shown_text.splitlines()[1:]]
    safe = ["'=1+1", "'+cmd", "'-a", "'@x", "'\tb", "-5.1%", "-12", "-0.5", "a=b", ""]
    assert lines == [[text, "-1.5"] for text in safe]


def test_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        shown("json", Output(content=float("inf")))


def plugged_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run spbench where a folder's distributions are installed."""
    environment = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": ""}
    command = [sys.executable, "-m", "spbench", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def install(folder: Path, entry: str) -> None:
    """Put a distribution with one entry point into a folder."""
    info = folder / "commands_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: commands-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[spbench.commands]\n{entry}\n")


def test_a_file_adds_a_command(tmp_path: Path) -> None:
    """A folder beside the package's own stands for one more file in it."""
    (tmp_path / "greetings").mkdir()
    (tmp_path / "greetings" / "__init__.py").write_text("")
    (tmp_path / "greetings" / "hello_command.py").write_text(
        "import click\n"
        "from spbench.bench.command_line.options import printed\n"
        "from spbench.bench.command_line.output import Output\n"
        "@click.command\n"
        "@printed\n"
        "def command():\n"
        '    return Output(["hello"], {"hello": 1}, code=1)\n'
    )
    script = (
        "import sys\nfrom spbench.bench import tools\ntools.__path__.append(sys.argv.pop(1))\n"
        "from spbench.bench.command_line.cli import main\nmain()\n"
    )
    for arguments, code, text in (
        (["--help"], 0, "  hello"),
        (["hello"], 1, "hello\n"),
        (["hello", "--format", "json"], 1, '{\n "hello": 1\n}\n'),
    ):
        command = [sys.executable, "-c", script, str(tmp_path), *arguments]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (made.returncode, text in made.stdout) == (code, True), made.stderr


def test_a_file_adds_a_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder beside the package's own stands for one more file in it."""
    (tmp_path / "as_tsv.py").write_text(TSV)
    monkeypatch.setattr("spbench.bench.command_line.forms.__path__", [str(tmp_path)])
    assert FORMS.names() == ["tsv"]
    assert shown("tsv", OUTPUT)[0] == "a\t1.5\nb,c\tTrue\tNone\n"


def test_a_plug_in_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    install(tmp_path, "peaks = absent_module:command\nrun = absent_module:command\ntuples = sys:path")
    for name, message in (
        (
            "peaks",
            "the command peaks (absent_module:command) cannot be loaded: No module named 'absent_module'",
        ),
        ("tuples", "tuples: its entry point names no click.Command; end it in :FUNCTION"),
        ("run", "2 commands are called 'run': absent_module:command and spbench.bench.tools.run.run_command"),
    ):
        made = plugged_in(tmp_path, name)
        assert (made.returncode, made.stdout, made.stderr.count("\n")) == (2, "", 1)
        assert message in made.stderr
    assert plugged_in(tmp_path, "list", "clusters").returncode == 0
    with pytest.raises(DiscoveryError, match="0 output forms are called 'xml'"):
        FORMS.load("xml")


def test_lists_have_every_form(command_line: Run) -> None:
    found = json.loads(command_line("list", "clusters", "--format", "json")[1])
    assert found["clusters"]["dgx-a100"].startswith("NVIDIA DGX A100")
    lines = command_line("list", "clusters", "--format", "csv")[1].splitlines()
    assert (lines[0], len(lines)) == ("kind,name,about", 1 + len(found["clusters"]))


def test_losses_have_columns_of_their_models() -> None:
    """BERT has two losses, a causal model one of another name."""
    rows = []
    for name in ("bert-mini", "tnl-mini", "tnl-mini"):
        fields = {"engine": "distributed", "learning": Learning(steps=2)}
        cell = make_cell(name, "single", {}, len(rows) + 1, 8, "fp32", **fields)
        losses = [{"step": n, **dict.fromkeys(model_preset(name, {}).losses, 1 / n)} for n in (1, 2)]
        rows.append(as_row(cell, Outcome("ok", "", Measurement(losses=losses).as_dict())))
    rows[2].measurement.losses = []
    first, second, third = result_table("Losses", rows).lines
    columns = [name for name in first if name.endswith(" loss")]
    assert columns == ["last mlm loss", "last order loss", "last language loss"]
    assert [first[name] for name in columns] == ["0.500000", "0.500000", None]
    assert [second[name] for name in columns] == [None, None, "0.500000"]
    assert [third[name] for name in columns] == [None] * 3
    assert first["steps"] == second["steps"] == 2


def test_the_mesh_has_a_column_where_the_number_of_gpus_does_not_say_it() -> None:
    def lines(*meshes: tuple[dict[str, int], list[str]]) -> list[dict[str, object]]:
        rows = []
        for sizes, mesh in meshes:
            settings = {"model": "bert-tiny", "strategy": "ring_self_attention", "batch": 2, "seq_len": 8}
            cell = Cell.model_validate({**settings, "sizes": sizes, "mesh": mesh})
            rows.append(as_row(cell, Outcome("ok", "", Measurement().as_dict())))
        return list(result_table("Meshes", rows).lines)

    replicated = {"dp": 2, "sp": 4}
    found = lines((replicated, ["dp", "sp"]), (replicated, ["sp", "dp"]), ({"sp": 8}, ["sp"]))
    assert [(line["GPUs"], line["mesh"]) for line in found] == [(8, "dp2xsp4"), (8, "sp4xdp2"), (8, "sp8")]
    assert {line["options"] for line in found} == {""}
    assert not any("mesh" in line for line in lines((replicated, ["dp", "sp"]), ({"sp": 4}, ["sp"])))


PARTS = {"compute_s": 1.2, "exposed_communication_s": 0.6, "bubble_s": 0.0, "overhead_s": 0.1, "host_s": 0.1}


def row(
    step_time_s: float = 2.0, seq_len: int = 8, engine: str = "virtual", **measured: Any
) -> dict[str, Any]:
    asked = {"model": "bert-tiny", "strategy": "single", "batch": 2, "seq_len": seq_len, "engine": engine}
    found = Measurement(step_time_s=step_time_s, tokens_per_s=123456.7, **measured)
    return as_row(Cell.model_validate(asked), Outcome("ok", "", found.as_dict()))


def simulated(step_time_s: float = 2.0, **measured: Any) -> dict[str, Any]:
    rests = {"rates": "sourced", "bound": "matmul", "mfu": 0.41234, "breakdown": PARTS}
    return row(step_time_s, **{**rests, **measured})


def test_a_simulated_time_has_three_digits_an_interval_and_its_parts() -> None:
    (line,) = result_table("Times", [simulated()]).lines
    assert line["step"].startswith("2.00 s ")
    assert line["step"].endswith("%")
    shown = [line[name] for name in ("tokens/s", "MFU", "compute", "exposed", "bubble", "host", "bound")]
    assert shown == ["123000", "41.2%", "60%", "30%", None, "10%", "matmul"]


def test_a_measured_time_has_three_digits_alone_and_is_called_a_cpus() -> None:
    table = result_table("Times", [row(0.0123456, engine="distributed")])
    (line,) = table.lines
    assert table.title.endswith("engine distributed on a CPU)")
    assert "CPU" not in result_table("Times", [simulated()]).title
    assert line["step"] == "12.3 ms"
    assert [line[name] for name in ("MFU", "compute", "host", "bound")] == [None] * 4


def test_ties_are_marked_in_tables_and_told_in_records() -> None:
    limit = packaged_model().tie("sourced")
    assert limit > 1.01
    times = [2.0, 2.0 * (1 + limit) / 2, 2.0 * limit * 1.01]
    rows = [simulated(time) for time in times]
    assert [(line["step"][:6], line["step"].endswith(TIE)) for line in result_table("T", rows).lines] == [
        (shown_time(time)[:6], tie) for time, tie in zip(times, (True, True, False), strict=True)
    ]
    assert [record["tie"] for record in flat_rows(rows)] == [True, True, False]


def test_records_have_every_field_in_full() -> None:
    (record,) = flat_rows([simulated(parts={"matmul_s": 0.7})])
    assert (record["step_time_s"], record["tokens_per_s"], record["mfu"]) == (2.0, 123456.7, 0.41234)
    assert record["step_time_low_s"] <= 2.0 <= record["step_time_high_s"]
    assert (record["matmul_s"], record["host_s"], record["bound"]) == (0.7, 0.1, "matmul")
    assert record["band"].startswith("sourced rates, matmul: ")


@pytest.mark.parametrize(("formula", "shown"), [(2**20 + 2**-20, None), (2**20 + 1, "1.00"), (2**21, "2.00")])
def test_the_closed_form_is_shown_where_it_differs(formula: float, shown: str | None) -> None:
    found = simulated(communication=[{"sent_bytes": 2**20, "axis": "sp"}], formula=[{"sent_bytes": formula}])
    (line,) = result_table("Bytes", [found]).lines
    assert (line["sent MiB/GPU"], line["by formula"]) == ("1.00", shown)


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(0, "0.00"), (2**30 // 10, "0.1"), (2**30 / 10, "0.10"), (2**20, "0.00098")]
)
def test_what_is_small_has_two_digits(nbytes: float, shown: str) -> None:
    found = simulated(peak_memory_bytes=nbytes, communication=[{"sent_bytes": nbytes, "axis": "sp"}])
    assert result_table("Bytes", [found]).lines[0]["peak GiB"] == shown


def ended(strategy: str, status: Any, reason: str = "") -> dict[str, Any]:
    asked = {"model": "bert-tiny", "strategy": strategy, "batch": 2, "seq_len": 8}
    return as_row(Cell.model_validate(asked), Outcome(status, reason, Measurement().as_dict()))


def test_a_run_ends_with_what_is_not_ok_and_the_counts() -> None:
    rows = [
        *(ended("single", "ok"), ended("lasp", "unsupported", "no linear attention")),
        *(ended(name, "oom", "1 GiB is missing") for name in ("dsp", "ulysses", "lasp2", "lasp2h")),
        ended("ring_attention", "failed", "KeyError: 'x'"),
    ]
    assert list(verdict(rows, [])) == [
        "failed: bert-tiny ring_attention 1",
        "oom: bert-tiny dsp 1; bert-tiny ulysses 1; bert-tiny lasp2 1 and 1 more",
        "7 cells: 4 oom, 1 ok, 1 unsupported, 1 failed",
    ]


def test_a_run_names_cells_that_are_tight() -> None:
    def full(*given: int) -> dict[str, Any]:
        steps = [{"step": at, "returned_bytes": n, "reserved_memory_bytes": 1} for at, n in enumerate(given)]
        return simulated(by_class=steps, usable_memory_bytes=2**40)

    rows = [full(0, 2**30, 2**31), full(0, 0, 2**30)]
    assert "L8: PyTorch gives 2.00 GiB of segments back" in next(verdict(rows[:1], []))
    assert "PyTorch gives 1.00 to 2.00 GiB" in next(verdict(rows, []))
    rows[0].cell["search"] = {"quantity": "seq_len", "step": 4, "limit": 8}
    assert "L8: a search ends where the card is full" in next(verdict(rows, []))
    assert len([*verdict([full(2**30, 0, 0), ended("single", "ok")], [])]) == 1


def test_a_terminal_counts_what_is_unsupported_by_reason() -> None:
    reason = "bert-tiny has no linear attention; use another strategy"
    rows = [
        ended("single", "ok"),
        *(ended(name, "unsupported", reason) for name in ("lasp", "lasp2", "lasp2h")),
    ]
    table = result_table("Strategies", rows)
    shown = screen_of(Output([table]), 100)
    assert f"3 more: unsupported: {reason} (lasp, lasp2, lasp2h)\n" in shown
    assert len(shown.splitlines()) == 5
    assert markdown(table).count("unsupported") == 3
    assert faults_of(Output([table])) == []


def test_a_reason_stands_beside_what_is_not_timed() -> None:
    timed = simulated() | {"reason": "a remark"}
    lines = result_table("Reasons", [timed, ended("dsp", "oom", "1 GiB is missing")]).lines
    assert [line["reason"] for line in lines] == [None, "1 GiB is missing"]


GIB = 2**30


def entry(rank: int, stage: int, step: int, status: str, peak: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "ranks": 4,
        "stage": stage,
        "step": step,
        "status": status,
        "peak_memory_bytes": peak,
        "peak_phase": "backward",
        "peak_held": {"parameters": GIB // 100, "activations": peak - GIB // 100},
        "reserved_memory_bytes": peak + GIB,
        "allocated_bytes": GIB // 2,
    }


def test_which_class_runs_out_at_which_step() -> None:
    classes = [
        entry(0, 0, 1, "ok", 10 * GIB),
        entry(0, 0, 2, "oom", 17 * GIB),
        entry(4, 1, 1, "ok", 8 * GIB),
        entry(4, 1, 2, "ok", 9 * GIB),
    ]
    table = memory_table({"cell": {"usable_memory_bytes": 16 * GIB, "by_class": classes}})
    assert isinstance(table, Table)
    assert table.title == "Memory of each rank class at each step, of 16.00 GiB"
    columns = (
        "cell",
        "rank",
        "ranks alike",
        "stage",
        "step",
        "fits",
        "peak GiB",
        "reserved GiB",
        "at the end GiB",
    )
    assert [tuple(line[column] for column in columns) for line in table.lines] == [
        (None, 0, 4, 0, 1, "yes", "10.00", "11.00", "0.50"),
        (None, 0, 4, 0, 2, "no", "17.00", "18.00", "0.50"),
        (None, 4, 4, 1, 1, "yes", "8.00", "9.00", "0.50"),
        (None, 4, 4, 1, 2, "yes", "9.00", "10.00", "0.50"),
    ]
    assert table.lines[0]["held at the peak (GiB)"] == "activations 9.99, parameters 0.01"


def test_several_cells_have_names_and_cards_of_their_own() -> None:
    one = [entry(0, 0, 1, "ok", GIB)]
    table = memory_table(
        {
            "small": {"usable_memory_bytes": 16 * GIB, "by_class": one},
            "large": {"usable_memory_bytes": 80 * GIB, "by_class": one},
            "losses": {"by_class": []},
        }
    )
    assert isinstance(table, Table)
    assert table.title == "Memory of each rank class at each step"
    assert [(line["cell"], line["stage"]) for line in table.lines] == [("small", None), ("large", None)]
    assert memory_table({"losses": {}}) == (
        "No cell has the memory of its rank classes: meters count it on virtual ranks and on CPUs."
    )
