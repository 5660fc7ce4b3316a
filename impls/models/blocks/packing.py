"""Sequences that are packed of documents: the documents' lengths, and what positions attend to."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import cycle
from typing import Any, NamedTuple

import yaml

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.strategies.base import Unsupported
from spbench.impls.strategies.nesting import PLUS, nesting

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


class Packed(NamedTuple):
    """A sequence that is packed of documents.

    Attributes:
        documents: the lengths of the documents with their padding, which add up to the sequence's length.
        padding: the number of positions that are padding.
    """

    documents: tuple[int, ...]
    padding: int


class PackedSequences:
    """Options of a model whose sequences may be packed of documents, which do not attend to each other.

    Attributes:
        documents: the lengths of documents in order, repeated until they fill the sequence; or the name of a
            distribution or its bins [shortest, longest, number of documents], from which lengths are drawn;
            (): a sequence is one document. The sequence's end cuts the last document. All sequences of a
            batch are packed alike.
        documents_seed: the seed of drawn lengths.
        documents_multiple: each document is padded at its end to a multiple of so many positions, which
            count as positions of the document. A cell may name a program of padding.yaml instead, and the
            cell's own program is the default; see :func:`padded_options`.
        packed_multiple: the length of a packed sequence must be a multiple of this number.
    """

    documents: Documents
    documents_seed: int
    documents_multiple: int | str
    packed_multiple: int

    def check_documents(self) -> None:
        """Raise ValueError for an unknown distribution, a length below 1, or a bin of another form."""
        for name in ("documents_multiple", "packed_multiple"):
            n = getattr(self, name)
            if n not in padding_rules() if isinstance(n, str) else n < 1:
                raise ValueError(f"{name} is 1 or more, or one of {', '.join(padding_rules())}, not {n!r}")
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

    def packed(self, seq_len: int) -> Packed:
        """The documents in a sequence, and how much of the sequence is padding.

        Raises:
            Unsupported: the program pads packed sequences to another length.
        """
        if not self.documents:
            return Packed((), 0)
        if past := seq_len % self.packed_multiple:
            why = f"packed sequences are padded to multiples of {self.packed_multiple} tokens"
            raise Unsupported(why, f"set seq_len {seq_len - past + self.packed_multiple}")
        if isinstance(self.documents_multiple, str):
            raise ValueError(
                "documents_multiple names a program, whose multiple only a cell knows; give a number"
            )
        lengths: Any = self.documents
        lengths = distributions()[lengths] if isinstance(lengths, str) else lengths
        return _packed(lengths, self.documents_seed, self.documents_multiple, seq_len)

    def attended(self, seq_len: int) -> Attended:
        """The positions that each position of a sequence attends to."""
        return Attended(self.packed(seq_len).documents) if self.documents else CAUSAL

    def padding(self, seq_len: int) -> float | None:
        """See :meth:`Model.padding`."""
        return self.packed(seq_len).padding / seq_len if self.documents else None

    def heeded(self, seq_len: int) -> dict[str, int]:
        """The dims of a site of attention that describe packed documents; {} for the plain causal mask."""
        return self.attended(seq_len).dims


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
def _packed(lengths: Any, seed: int, multiple: int, seq_len: int) -> Packed:
    """Documents of these lengths, repeated, or of random lengths of these bins, that fill ``seq_len``
    positions, each padded to a multiple of ``multiple``. The last one is cut to fit."""
    left, found, padding = seq_len, list[int](), 0
    source: Iterator[int] = cycle(lengths) if isinstance(lengths[0], int) else _drawn(lengths, seed)
    for length in source:
        real = min(left, length)
        found.append(min(left, math.ceil(real / multiple) * multiple))
        padding += found[-1] - real
        if not (left := left - found[-1]):
            break
    return Packed((*found,), padding)


def _drawn(bins: Any, seed: int) -> Iterator[int]:
    """Random lengths: a bin is drawn by its number of documents, and a length evenly within the bin."""
    generator, counts = random.Random(seed), [count for _, _, count in bins]
    while True:
        first, last, _ = generator.choices(bins, counts)[0]
        yield generator.randint(max(1, first), last)


@cache
def padding_rules() -> Mapping[str, Mapping[str, Any]]:
    """The rules of padding.yaml, by program."""
    text = files(FOLDER).joinpath("padding.yaml").read_text(encoding="utf-8")
    rules: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return rules


def padded_options(
    options: Mapping[str, Any], program: str, strategy: str, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """A model's options with the multiples to which a program pads packed documents, unless the options have
    numbers, or there are no documents, or padding.yaml does not have the program.

    Args:
        program: the program, if ``documents_multiple`` names none.
        strategy: the strategies' names with plus signs between.
        sizes: the number of ranks along each axis.
    """
    rule = padding_rules().get(options.get("documents_multiple", program))
    if not options.get("documents") or rule is None:
        return {**options}
    strategies, document, packed = strategy.split(PLUS), rule["document"], rule["packed"]
    if set(rule.get("not_with", ())).intersection(strategies):
        return {**options, "documents_multiple": 1}
    ranks = nesting(strategy).sequence_ranks(sizes)
    layout = document["sequence_ranks"] * ranks if ranks > 1 else 1
    layout *= sizes.get("tp", 1) if set(document["tensor_ranks"]).intersection(strategies) else 1
    of_kernels = _of_kernels(document, options)
    multiple = layout if rule.get("kernels_alone") and layout > 1 else math.lcm(layout, of_kernels)
    whole = math.lcm(multiple, layout * _of_kernels(packed, options))
    return {**options, "documents_multiple": multiple, "packed_multiple": whole}


def _of_kernels(multiples: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """The largest multiple for the values of a model's options, such as ``fp8: {mxfp8: 32}``."""
    of_options = (of.get(options.get(name)) for name, of in multiples.items() if isinstance(of, Mapping))
    return max((n for n in of_options if n), default=1)
