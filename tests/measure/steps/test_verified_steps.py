"""`spbench verify` on users' steps: clean ones are green, and each planted fault is told in its own words."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_step import verify_step
from spbench.bench.verdicts import VerifyRow
from tests.grid import data

EXAMPLES = Path(__file__).parents[2] / "examples" / "steps"
FAULTS = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def told(row: VerifyRow) -> str:
    return "\n".join([row.verdict, row.reason, row.explanation])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_clean_step_is_green(path: Path, pool: RankPool):
    rows = list(verify_step(f"{path}:train", (2, 4), pool=pool))
    assert [(row.size, row.status) for row in rows] == [(2, "green"), (4, "green")], rows


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_told(fault: str, pool: RankPool, tmp_path: Path):
    planted = FAULTS[fault]
    source = (EXAMPLES / planted["file"]).read_text(encoding="utf-8")
    assert source.count(planted["old"]) == 1
    (tmp_path / planted["file"]).write_text(source.replace(planted["old"], planted["new"]), encoding="utf-8")
    one, two = verify_step(f"{tmp_path / planted['file']}:train", (1, 2), pool=pool)
    assert (one.status, two.status) == ("green", "RED")
    assert planted["told"] in told(two)
    assert "no end within" not in two.reason  # ranks that only wait are told before the pool's limit


SHARDED_BY_HAND = data(__file__)["SHARDED_BY_HAND"]


def test_a_weight_that_is_a_part_is_not_compared(pool: RankPool, tmp_path: Path):
    (tmp_path / "sharded.py").write_text(SHARDED_BY_HAND, encoding="utf-8")
    (row,) = verify_step(f"{tmp_path / 'sharded.py'}:train", (2,), pool=pool)
    assert row.status == "unsupported"
    assert "weight bias has the shape [4], not [8] as on one rank; make it a DTensor" in row.reason
