"""Which tests the hook before a commit runs."""

from pathlib import Path

from scripts.covering_tests import covering_tests
from tests.grid import tabled


@tabled(__file__, "test_the_tests_of_changed_files")
def test_the_tests_of_changed_files(files: list[str], tests: list[str]) -> None:
    assert covering_tests(files) == tests
    assert all((Path(__file__).parents[2] / each).exists() for each in tests)
