"""Sequences that are packed of documents: the documents' lengths, and what positions attend to."""

import random
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, cast

from spbench.impls.attended import CAUSAL, Attended

#: the folder of distributions of lengths: NAME.csv, with the columns first, last (the shortest and longest
#: length of a bin) and documents (how many documents are in the bin); lines that begin with # say the source
FOLDER = "spbench.impls.models.documents"

#: lengths of documents, the name of a distribution of lengths, or a distribution's bins
Documents = str | Sequence[int] | Sequence[Sequence[int]]
#: the bins of a distribution: (shortest length, longest length, number of documents)
Bins = tuple[tuple[int, int, int], ...]


def check_window(window: int | None) -> None:
    """Raise ValueError for a window in which a position does not attend to itself."""
    if window is not None and window < 1:
        raise ValueError(f"a window has at least 1 position, its own, not {window}; leave it out for none")


class PackedSequences:
    """Options of a model whose sequences may be packed of documents, which do not attend to each other.

    Attributes:
        documents: the lengths of documents in order, repeated until they fill the sequence; or the name of a
            distribution or its bins [shortest, longest, number of documents], from which lengths are drawn;
            (): a sequence is one document. The sequence's end cuts the last document. All sequences of a
            batch are packed alike.
        documents_seed: the seed of drawn lengths.
    """

    documents: Documents
    documents_seed: int

    def check_documents(self) -> None:
        """Raise ValueError for an unknown distribution, a length below 1, or a bin of another form."""
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
        """The positions that each position of a sequence attends to."""
        if not self.documents:
            return CAUSAL
        if isinstance(self.documents, str):
            return Attended(_drawn(distributions()[self.documents], self.documents_seed, seq_len))
        if isinstance(self.documents[0], tuple):
            return Attended(_drawn(cast(Bins, self.documents), self.documents_seed, seq_len))
        return Attended(_filled(cast(tuple[int, ...], self.documents), seq_len))

    def heeded(self, seq_len: int) -> dict[str, int]:
        """The dims of a site of attention that describe packed documents; {} for the plain causal mask."""
        return self.attended(seq_len).dims


def _filled(lengths: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """The lengths, repeated until they fill ``seq_len`` positions, with the last length cut to fit."""
    left = seq_len
    found: list[int] = []
    while left:
        found.append(min(left, lengths[len(found) % len(lengths)]))
        left -= found[-1]
    return tuple(found)


@cache
def distributions() -> Mapping[str, Bins]:
    """The bins of each packaged distribution of lengths, by name."""
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
    """Random lengths that fill ``seq_len`` positions: a bin is drawn by its number of documents, and a length
    evenly within the bin. The last length is cut to fit."""
    generator, left, counts = random.Random(seed), seq_len, [count for _, _, count in bins]
    found: list[int] = []
    while left:
        first, last, _ = generator.choices(bins, counts)[0]
        found.append(min(left, generator.randint(max(1, first), last)))
        left -= found[-1]
    return tuple(found)
