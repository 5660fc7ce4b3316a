"""Reports: the forms they are printed in, and forms that other distributions add."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from spbench.bench.cell import Cell, Learning
from spbench.bench.command_line.forms import FORMS
from spbench.bench.command_line.output import Output, Table
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.tools.run.run_output import result_table
from spbench.impls.discovery import DiscoveryError
from spbench.impls.registries import model_preset
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
    install(tmp_path, "peaks = absent_module:command\nrun = absent_module:command")
    for name, message in (
        (
            "peaks",
            "the command peaks (absent_module:command) cannot be loaded: No module named 'absent_module'",
        ),
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
        cell = Cell(
            model=name,
            strategy="single",
            batch=len(rows) + 1,
            seq_len=8,
            engine="distributed",
            learning=Learning(steps=2),
        )
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
