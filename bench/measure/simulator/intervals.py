"""Times of many ranks at once, as columns of arrays: unions of intervals, and sums."""

from __future__ import annotations

import numpy as np


def covered(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Of each column of [events, ranks], the length of the union of its intervals."""
    return column_sums(np.subtract(*union(start, end)[::-1]))


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each column of [events, ranks], starts and ends of intervals that do not overlap and have the same
    union, in order."""
    # nearly in order already, which a stable sort makes use of
    order = np.argsort(start, axis=0, kind="stable")
    start, end = np.take_along_axis(start, order, 0), np.take_along_axis(end, order, 0)
    earlier = np.zeros_like(end)
    np.maximum.accumulate(end[:-1], axis=0, out=earlier[1:])
    first = np.maximum(start, earlier)
    return first, np.maximum(first, end)


def covered_within(start: np.ndarray, end: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """[intervals, ranks]: how much of each interval, ``since`` to ``until``, the union of other intervals,
    [events, ranks], covers."""
    covered = np.zeros_like(since)
    if not len(start):
        return covered
    first, last = union(start, end)
    for rank in range(since.shape[1]):
        moments = np.stack((first[:, rank], last[:, rank]), axis=1).ravel()
        # the covered time up to each moment grows from a first to its last, and stands still in between
        grown = np.cumsum(last[:, rank] - first[:, rank])
        so_far = np.stack((np.concatenate(([0.0], grown[:-1])), grown), axis=1).ravel()
        covered[:, rank] = np.interp(until[:, rank], moments, so_far)
        covered[:, rank] -= np.interp(since[:, rank], moments, so_far)
    return covered


def column_sums(values: np.ndarray) -> np.ndarray:
    """Sums of the columns of [steps, ranks], from the first row to the last. numpy's own sum adds in another
    order where there is one column, so that a rank's sum would depend on how many are simulated."""
    if not len(values):
        return np.zeros(values.shape[1])
    sums: np.ndarray = np.cumsum(values, axis=0)[-1]
    return sums
