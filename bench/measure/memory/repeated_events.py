"""Stretches of a memory log in which a period of events is there again and again, as the steps of a ring.

Two events are alike if both are births of as many bytes on one stream, or both are deaths of a storage that
was born as many births ago. So where each event of a stretch is like that one period before, the numbers of
storages are those of a period before, larger by its births.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: events between two at which is looked for a period
_LOOK = 512
#: events of the longest period, and the fewest periods of a stretch
_LONGEST, _FEWEST = 2**13, 8
#: events that are looked for as one, a power of two; of the places where they are, the nearest so many count
_WORD, _PLACES = 8, 8
#: events that are compared at first, where two lists may soon part
_FIRST_LOOK = 256


class Stretch(NamedTuple):
    """Events of a log from ``first`` up to ``end``, of which each is like that ``period`` events before.

    Attributes:
        births: in a period.
    """

    first: int
    end: int
    period: int
    births: int


def in_common(a: np.ndarray, b: np.ndarray) -> int:
    """How many entries two lists have in common, from the first on."""
    most, at, look = min(len(a), len(b)), 0, _FIRST_LOOK
    while at < most:
        end = min(most, at + look)
        differ = a[at:end] != b[at:end]
        if differ.any():
            return at + int(differ.argmax())
        at, look = end, 2 * look
    return most


def stretches(sizes: Sequence[int], events: Sequence[int], streams: Sequence[int] = ()) -> list[Stretch]:
    """The stretches of a log, see :class:`MemoryLog`, in order; not all that there are: those that are found
    with little effort."""
    numbers = np.asarray(events, dtype=np.int64)
    born = numbers > 0
    births = numbers[born]
    nbytes, streams_used = np.asarray(sizes, dtype=np.int64), max(streams, default=0) + 1
    in_order = len(births) <= len(nbytes) and (births == np.arange(1, len(births) + 1)).all()
    if not in_order or nbytes.max(initial=0) >= 2**62 // streams_used:
        return []
    newest = np.maximum.accumulate(np.where(born, numbers, 0))
    like = -1 - newest - numbers  # of a death: below 0, by how many were born after its storage
    asked = nbytes * streams_used + (np.asarray(streams, dtype=np.int64) if streams else 0)
    like[born] = asked[births - 1]
    words, at = _words(like), 0
    longest: list[Stretch] = []
    while at < len(words):
        stretch = _longest(like, words, longest[-1].end if longest else 0, at)
        if stretch is not None:
            longest.append(stretch)
        at = at + _LOOK if stretch is None else stretch.end
    return longest


def _words(like: np.ndarray) -> np.ndarray:
    """A number for each event but the last ones, the same where it and those after it are alike."""
    words, length = like.astype(np.uint64), 1
    while length < _WORD and length < len(words):
        words = words[:-length] * np.uint64(0x9E3779B97F4A7C15) + words[length:]
        words ^= words >> np.uint64(29)
        length *= 2
    return words


def _longest(like: np.ndarray, words: np.ndarray, free: int, at: int) -> Stretch | None:
    """The stretch with event ``at`` that ends last, and begins at ``free`` or later; None: there is none."""
    places = np.flatnonzero(words[at + 1 : at + 1 + _LONGEST] == words[at])[:_PLACES] + 1
    ends = [(at + period + in_common(like[at:], like[at + period :]), -period) for period in places.tolist()]
    if not ends:
        return None
    end, negative = max(ends)  # the shortest of those that end last
    period = -negative
    begin = max(free, at - _LOOK)
    differ = np.flatnonzero(like[begin:at] != like[begin + period : at + period])
    first = begin + int(differ[-1]) + 1 if len(differ) else begin
    births = int((like[end - period : end] >= 0).sum())
    return Stretch(first, end, period, births) if births and end - first >= _FEWEST * period else None
