"""`spbench doctor`: its lines and its exit code, with a management library that is built from C."""

import json
from pathlib import Path

import pytest

from tests.bench.nvml_library import SCENARIO, built
from tests.grid import tabled
from tests.tools.commands.conftest import Run


def test_the_driver_and_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(built(tmp_path)))
    code, out, _ = command_line("doctor", "--check", "driver", "--format", "json")
    found = {line["subject"]: line for line in json.loads(out)["observations"]}
    assert code == 0
    assert {line["status"] for line in found.values()} == {"ok"}
    assert found["NVIDIA driver"]["found"] == "580.65.06, CUDA up to 13.0"
    assert found["GPU 1"]["found"] == (
        "Test GPU one, GPU-11111111-aaaa-bbbb-cccc-111111111111, 80.0 GiB, 1.0 GiB in use, "
        "compute capability 9.0, 2 NVLinks active"
    )
    assert found["peers of GPU 0"]["found"] == "GPU 1: peer access over NVLink"
    monkeypatch.setenv(SCENARIO, "no peer access")
    out = command_line("doctor", "--check", "driver", "--format", "json")[1]
    (peers,) = (line for line in json.loads(out)["observations"] if line["subject"] == "peers of GPU 0")
    assert (peers["status"], peers["found"]) == ("warning", "GPU 1: no peer access across a PCIe host bridge")
    assert "ACS" in peers["remedy"]


@tabled(__file__, "a_driver_that_does_not_work")
def test_a_driver_that_does_not_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command_line: Run,
    scenario: str,
    subject: str,
    what: str,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(built(tmp_path)))
    monkeypatch.setenv(SCENARIO, scenario)
    code, out, _ = command_line("doctor", "--check", "driver", "--format", "json")
    (line,) = (line for line in json.loads(out)["observations"] if line["subject"] == subject)
    assert (code, line["status"], line["found"]) == (0, "missing", what)  # the CPU's paths work


def test_what_is_needed_decides_on_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, command_line: Run, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command_line("doctor", "--check", "python,disk")
    assert (code, out.splitlines()[-1]) == (
        0,
        "nothing that is needed is missing; next: spbench run --scenario max_seqlen",
    )
    assert [line.split("|")[1:3] for line in out.splitlines() if "| Python " in line]
    Path("results").touch()
    code, out, _ = command_line("doctor", "--check", "disk")
    assert (code, out.splitlines()[-1]) == (
        1,
        "needed and not working: disk of results; next: mend these, and run spbench doctor again",
    )


@pytest.mark.slow
def test_everything_that_is_needed_works_here(command_line: Run) -> None:
    code, out, _ = command_line("doctor", "--format", "json")
    found = {line["subject"]: line for line in json.loads(out)["observations"]}
    assert code == 0
    assert {"Python", "torch", "Gloo", "virtual ranks", "Gloo ranks", "disk of results"} <= set(found)
    assert all(line["status"] == "ok" or line["remedy"] for line in found.values())
