"""Parameters of which the default run tries some and the slow run all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Values of one case of the slow run alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(values: Iterable[Any], *always: Any) -> list[Any]:
    """These values, of which the default run has only those that are named ``always``."""
    return [value if value in always else slow(value) for value in values]
