"""Least squares of relative errors, with coefficients that are not negative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls


class LeastSquares(NamedTuple):
    """A sum of columns, each by its coefficient, that comes near to values.

    Attributes:
        coefficients: of the columns, in their order.
        mean_error, largest_error: of |fitted / given - 1| over the values.
    """

    coefficients: tuple[float, ...]
    mean_error: float
    largest_error: float


def least_squares(values: Sequence[float], *columns: Sequence[float]) -> LeastSquares:
    """The coefficients for which the squares of the relative errors have the least sum. Relative, since times
    of messages of bytes and of gigabytes count alike."""
    matrix = np.column_stack(columns) / np.asarray(values, float)[:, None]
    scale = np.linalg.norm(matrix, axis=0)  # seconds stand beside bytes and FLOPs
    coefficients = nnls(matrix / scale, np.ones(len(values)))[0] / scale
    errors = np.abs(matrix @ coefficients - 1)
    return LeastSquares(tuple(map(float, coefficients)), float(errors.mean()), float(errors.max()))
