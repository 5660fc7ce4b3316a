"""Which tests the hook before a commit runs."""

from pathlib import Path

import pytest

from scripts.covering_tests import covering_tests


@pytest.mark.parametrize(
    ("files", "tests"),
    [
        (["bench/tools/choose/advice.py"], ["tests/tools/choose"]),
        (["bench/measure/verify/proof.py", "bench/measure/verify/oracle.py"], ["tests/measure/verify"]),
        (["impls/strategies/lasp.py"], ["tests/impls/strategies"]),
        (["bench/units.py"], ["tests/bench"]),
        (["docs/fit.md", "README.md", "CONTRIBUTING.md"], ["tests/docs"]),
        ([".ci/run", ".github/workflows/ci.yml"], ["tests/ci"]),
        (["tests/plots/test_every_figure.py", "tests/plots/rows.py"], ["tests/plots/test_every_figure.py"]),
        (["tests/plots/test_every_figure.py", "plots/style.py"], ["tests/plots"]),
        (["LICENSE", "results/papers/rsa.csv"], []),
    ],
)
def test_the_tests_of_changed_files(files: list[str], tests: list[str]) -> None:
    assert covering_tests(files) == tests
    assert all((Path(__file__).parents[2] / each).exists() for each in tests)
