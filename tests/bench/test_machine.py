"""The facts of the machine in the provenance of rows."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spbench.bench.measure.sweep.provenance as bench_provenance
from spbench.bench.measure.sweep.provenance import machine_facts, provenance
from tests.bench.nvml_library import built, printed

CODE = """
import json, sys
from spbench.bench.measure.sweep.provenance import machine_facts
print(json.dumps([machine_facts(), "torch" in sys.modules]))
"""


def test_this_machine() -> None:
    facts = machine_facts()
    assert provenance()["machine"] == facts
    assert facts["os"].startswith(os.uname().sysname)
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory_bytes"] > 2**28
    assert facts["cpu"]


def test_gpus_are_named_by_the_driver_without_torch(tmp_path: Path) -> None:
    facts, torch_was_imported = printed(built(tmp_path), CODE)
    assert len(facts["gpus"]) == 2
    assert facts["gpus"][0].startswith("Test GPU")
    assert facts["gpu_driver"]
    assert not torch_was_imported


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone binds processes to cores")
def test_cores_are_those_that_the_process_may_use() -> None:
    code = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{CODE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert '"cores": 1' in done.stdout


@pytest.mark.parametrize(("name", "shown"), [("", "riscv64"), ("A64FX", "A64FX")])
def test_a_processor_without_a_name_is_its_architecture(
    monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    """As in containers of other architectures, whose /proc/cpuinfo has no model name."""
    monkeypatch.setattr(
        bench_provenance, "open", lambda path, **how: io.StringIO("processor: 0\n"), raising=False
    )
    monkeypatch.setattr("platform.processor", lambda: name)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert bench_provenance.cpu_model() == shown
