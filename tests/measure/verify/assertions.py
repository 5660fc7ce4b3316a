"""Assertions on the verdict of the checker, for all tests that ask for one."""

from collections.abc import Mapping

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import VerifyRow, verify_case
from spbench.bench.measure.verify.verified_run import Case


def assert_green(pool: RankPool, case: Case, sizes: int | Mapping[str, int] = 4) -> VerifyRow:
    row = verify_case(pool, case, sizes)
    assert row.status == "green", row
    return row


def assert_red(pool: RankPool, case: Case, sizes: int | Mapping[str, int] = 4, *tensors: str) -> VerifyRow:
    """The case is wrong, not broken; the name of the worst tensor begins with one of ``tensors``."""
    row = verify_case(pool, case, sizes)
    assert row.status == "RED", row
    assert row.tensor, row.reason
    assert not tensors or row.tensor.startswith(tensors), row
    assert (row.error or 0) > (row.limit or 0), row
    return row
