"""github-action-benchmark and PyTorch HUD: what they take, and our values."""

import json
import struct
from pathlib import Path

import jsonschema

from tests.grid import data
from tests.tools.commands.conftest import Run

SCHEMAS = data(Path(__file__).with_name("schemas.yaml"))


def test_both_take_what_is_exported(results: Path, tmp_path: Path, command_line: Run) -> None:
    """Of HUD also that a Float32, which it keeps, holds the MiB."""
    words = ("export", str(results), "--output", str(tmp_path / "o"), "--to")
    assert command_line(*words, "github-action")[0] == 0
    for path in (tmp_path / "o").iterdir():
        jsonschema.validate(json.loads(path.read_text()), SCHEMAS["github-action"])
    records = json.loads(command_line("export", str(results), "--to", "hud")[1])
    jsonschema.validate(records, SCHEMAS["hud"])
    peaks = [record["metric"] for record in records if record["metric"]["name"] == "peak_memory_mib"]
    assert len(peaks) == 4
    for peak in peaks:
        (kept,) = struct.unpack("f", struct.pack("f", *peak["benchmark_values"]))
        exact = int(peak["extra_info"]["exact_value"])
        assert abs(kept * 2**20 - exact) <= 2**-24 * exact
