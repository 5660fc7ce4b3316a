"""Planted faults that `spbench trace` tells: other bytes, a line that holds more, ranks that wait."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from spbench.api import MeasuredStep, measure_step
from spbench.bench.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples" / "steps"
FAULTS = yaml.safe_load(Path(__file__).with_name("traced_faults.yaml").read_text(encoding="utf-8"))


@cache
def clean(file: str) -> MeasuredStep:
    return measure_step(f"{EXAMPLES / file}:train", world_size=2, cluster="dgx-h100")


def sent(step: MeasuredStep) -> dict[tuple[str, str], int]:
    """The bytes that the rank that sends most sends, by phase and collective."""
    by_kind: Counter[tuple[str, str]] = Counter()
    for entry in step.measurement.communication:
        by_kind[entry["phase"], entry["collective"]] += entry["sent_bytes"]
    return dict(by_kind)


def held(step: MeasuredStep) -> Counter[str]:
    """The bytes at the peak by the user's line."""
    lines: Counter[str] = Counter()
    for part in step.held():
        lines[part["place"].rpartition(" ")[2]] += part["bytes"]
    return lines


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_a_trace(fault: str, tmp_path: Path):
    planted = FAULTS[fault]
    source = (EXAMPLES / planted["file"]).read_text(encoding="utf-8")
    assert source.count(planted["old"]) == 1
    (tmp_path / planted["file"]).write_text(source.replace(planted["old"], planted["new"]), encoding="utf-8")
    faulty, right = (
        measure_step(f"{tmp_path / planted['file']}:train", world_size=2, cluster="dgx-h100"),
        clean(planted["file"]),
    )
    if "told" in planted:
        with pytest.raises(UserError, match=planted["told"]):
            faulty.timeline  # noqa: B018
    elif "sent" in planted:
        ours, theirs = sent(faulty), sent(right)
        differ = [kind for kind in {**ours, **theirs} if ours.get(kind, 0) != theirs.get(kind, 0)]
        assert differ == [tuple(planted["sent"])], (ours, theirs)
    else:
        ((line, nbytes),) = (held(faulty) - held(right)).most_common(1)
        assert line == planted["held"]
        assert faulty.measurement.peak_memory_bytes - right.measurement.peak_memory_bytes >= nbytes / 2
