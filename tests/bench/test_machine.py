"""The facts of the machine in the provenance of rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spbench.bench.provenance import machine_facts, provenance
from tests.bench.nvml_library import built, printed

CODE = """
import json, sys
from spbench.bench.provenance import machine_facts
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
