"""Sequences that are packed of documents: whose lengths they have, and what positions attend to.

Shape letters: L sequence.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from spbench.impls.attended import CAUSAL, Attended

#: the folder of distributions of lengths: NAME.csv, with the columns first, last (lengths of a bin, both
#: included) and documents (how many have one), and where they are from in lines that begin with #
FOLDER = "spbench.impls.models.documents"


def check_window(window: int | None) -> None:
    """Raise ValueError for a window in which a position does not attend to itself."""
    if window is not None and window < 1:
        raise ValueError(f"a window has at least 1 position, its own, not {window}; leave it out for none")


class PackedSequences:
    """Options of a model whose sequences may be packed of documents, which do not see each other.

    Attributes:
        documents: their lengths in order, from the first again where the sequence is longer, or the name of a
            distribution, from whose bins lengths are drawn; none: a sequence is one document. The last
            document is cut where the sequence ends. All sequences of a batch are packed alike.
        documents_seed: of the lengths that are drawn.
    """

    documents: str | Sequence[int]
    documents_seed: int

    def check_documents(self) -> None:
        """Raise ValueError where there is no such distribution, or a length is not at least 1."""
        if isinstance(self.documents, str):
            if self.documents not in (known := distributions()):
                raise ValueError(
                    f"documents is a list of lengths or one of {', '.join(known)}, not {self.documents!r}"
                )
            return
        object.__setattr__(self, "documents", tuple(self.documents))  # a list has no hash
        if wrong := [n for n in self.documents if n < 1]:
            raise ValueError(f"a document has at least 1 position, not {wrong[0]}")

    def attended(self, seq_len: int) -> Attended:
        """What the positions of a sequence attend to."""
        if not self.documents:
            return CAUSAL
        if isinstance(self.documents, str):
            return Attended(_drawn(self.documents, self.documents_seed, seq_len))
        return Attended(_filled(tuple(self.documents), seq_len))

    def heeded(self, seq_len: int) -> dict[str, int]:
        """The dims of a site of attention that say what it heeds beside the causal mask."""
        return self.attended(seq_len).dims


def _filled(lengths: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """The lengths, again and again, of a sequence that ends in the last of them."""
    left = seq_len
    found: list[int] = []
    while left:
        found.append(min(left, lengths[len(found) % len(lengths)]))
        left -= found[-1]
    return tuple(found)


@dataclass(frozen=True)
class Distribution:
    """How long documents are.

    Attributes:
        bins: (shortest, longest, how many documents).
    """

    bins: tuple[tuple[int, int, int], ...]

    def draw(self, generator: random.Random) -> int:
        """The length of a document: of a bin by its share of all documents, even within it."""
        first, last, _ = generator.choices(self.bins, [n for _, _, n in self.bins])[0]
        return generator.randint(max(1, first), last)


@cache
def distributions() -> Mapping[str, Distribution]:
    """The distributions by name."""
    found: dict[str, Distribution] = {}
    for file in sorted(files(FOLDER).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".csv"):
            rows = [line.split(",") for line in file.read_text().splitlines() if not line.startswith("#")]
            bins: Any = tuple(tuple(map(int, row)) for row in rows[1:])
            found[file.name.removesuffix(".csv")] = Distribution(bins)
    return found


@lru_cache(maxsize=64)
def _drawn(name: str, seed: int, seq_len: int) -> tuple[int, ...]:
    generator, left = random.Random(seed), seq_len
    found: list[int] = []
    while left:
        found.append(min(left, distributions()[name].draw(generator)))
        left -= found[-1]
    return tuple(found)
