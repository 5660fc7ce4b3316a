"""Sequences that are packed of documents: whose lengths they have, and what positions attend to.

Shape letters: L sequence.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, cast

from spbench.impls.attended import CAUSAL, Attended

#: the folder of distributions of lengths: NAME.csv, with the columns first, last (lengths of a bin, both
#: included) and documents (how many have one), and where they are from in lines that begin with #
FOLDER = "spbench.impls.models.documents"

#: lengths, the name of a distribution, or its bins
Documents = str | Sequence[int] | Sequence[Sequence[int]]
#: (shortest, longest, how many documents) of each
Bins = tuple[tuple[int, int, int], ...]


def check_window(window: int | None) -> None:
    """Raise ValueError for a window in which a position does not attend to itself."""
    if window is not None and window < 1:
        raise ValueError(f"a window has at least 1 position, its own, not {window}; leave it out for none")


class PackedSequences:
    """Options of a model whose sequences may be packed of documents, which do not see each other.

    Attributes:
        documents: their lengths in order, from the first again where the sequence is longer; or the name of a
            distribution, or its bins [shortest, longest, how many documents], from which lengths are drawn;
            none: a sequence is one document. The last document is cut where the sequence ends. All sequences
            of a batch are packed alike.
        documents_seed: of the lengths that are drawn.
    """

    documents: Documents
    documents_seed: int

    def check_documents(self) -> None:
        """Raise ValueError where there is no such distribution, a length is not at least 1, or a bin is
        none."""
        if isinstance(self.documents, str):
            if self.documents not in (known := distributions()):
                raise ValueError(
                    f"documents is a list of lengths, a file of them or one of {', '.join(known)}, not"
                    f" {self.documents!r}"
                )
            return
        made = tuple(n if isinstance(n, int) else (*n,) for n in self.documents)
        object.__setattr__(self, "documents", made)  # a list has no hash
        for each in made:
            if isinstance(each, int) and each < 1:
                raise ValueError(f"a document has at least 1 position, not {each}")
            if isinstance(each, tuple) and not (len(each) == 3 and 1 <= each[0] <= each[1] and each[2] > 0):
                raise ValueError(f"a bin of documents is [shortest, longest, how many], not {[*each]}")

    def attended(self, seq_len: int) -> Attended:
        """What the positions of a sequence attend to."""
        if not self.documents:
            return CAUSAL
        if isinstance(self.documents, str):
            return Attended(_drawn(distributions()[self.documents], self.documents_seed, seq_len))
        if isinstance(self.documents[0], tuple):
            return Attended(_drawn(cast(Bins, self.documents), self.documents_seed, seq_len))
        return Attended(_filled(cast(tuple[int, ...], self.documents), seq_len))

    def heeded(self, seq_len: int) -> dict[str, int]:
        """The dims of a site of attention that say what it heeds beside the causal mask."""
        return self.attended(seq_len).dims


def _filled(lengths: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """The lengths in turn, again and again, until they fill ``seq_len`` positions; the last is cut to fit."""
    left = seq_len
    found: list[int] = []
    while left:
        found.append(min(left, lengths[len(found) % len(lengths)]))
        left -= found[-1]
    return tuple(found)


@cache
def distributions() -> Mapping[str, Bins]:
    """The distributions by name."""
    found: dict[str, Bins] = {}
    for file in sorted(files(FOLDER).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".csv"):
            rows = [
                line.split(",")
                for line in file.read_text(encoding="utf-8").splitlines()
                if not line.startswith("#")
            ]
            bins: Any = tuple(tuple(map(int, row)) for row in rows[1:])
            found[file.name.removesuffix(".csv")] = bins
    return found


@lru_cache(maxsize=64)
def _drawn(bins: Bins, seed: int, seq_len: int) -> tuple[int, ...]:
    """Lengths, each of a bin by its share of all documents, even within it."""
    generator, left, counts = random.Random(seed), seq_len, [count for _, _, count in bins]
    found: list[int] = []
    while left:
        first, last, _ = generator.choices(bins, counts)[0]
        found.append(min(left, generator.randint(max(1, first), last)))
        left -= found[-1]
    return tuple(found)
