"""Lists in which a deeper model has longer runs of like blocks, so that two depths determine a third.

The lists of a model of n layers (births and deaths of storages, the events of a program) have a run of like
blocks for each pass over the layers: one of forward, one of backward, some of the optimizer. Each further
layer adds a block to each run. Two lists are aligned whose models differ by two layers: where the lists part,
the deeper list has two like blocks more. The entries between runs are the same in both lists. So a block can
begin anywhere in a layer, and the first and last layers may differ from the others and lie between the runs.

Entries refer to earlier entries: a death to a birth, a wait to a communication. In a deeper list an entry
refers to the same place of a block whose number is linear in the number of the referring block and in the
number of layers: for example, backward frees in its block j the tensors that forward made in block n - 1 - j.
"""

from typing import NamedTuple

import numpy as np

from spbench.bench.measure.engines.listed import Listed, NotAlike, Order

#: how many entries are compared first, since two lists may soon part
_FIRST_LOOK = 256


class Run(NamedTuple):
    """A run of equal blocks in the shallower model's list: ``blocks`` blocks of ``length`` entries, which end
    before entry ``end``. The ``part`` entries before the first block equal the end of a further block."""

    end: int
    length: int
    blocks: int
    part: int

    @property
    def start(self) -> int:
        return self.end - self.blocks * self.length


def in_common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading entries in which two lists are equal."""
    most, at, look = min(len(a), len(b)), 0, _FIRST_LOOK
    while at < most:
        end = min(most, at + look)
        differ = a[at:end] != b[at:end]
        if differ.any():
            return at + int(differ.argmax())
        at, look = end, 2 * look
    return most


def runs_of(shallow: np.ndarray, deeper: np.ndarray) -> list[Run]:
    """The runs of blocks in a shallow model's tokens that have two blocks more in a deeper model's tokens.

    Raises:
        NotAlike: the lists differ in more than two blocks for each run.
    """
    runs: list[Run] = []
    at = there = free = 0  # entries from `free` on belong to no run yet
    while True:
        alike = in_common(shallow[at:], deeper[there:])
        at, there = at + alike, there + alike
        if at == len(shallow) and there == len(deeper):
            return runs
        length = _inserted(shallow[at:], deeper[there:])
        count = 0
        block = deeper[there : there + length]
        while (start := at - (count + 1) * length) >= free and np.array_equal(
            shallow[start : start + length], block
        ):
            count += 1
        before = shallow[max(free, at - (count + 1) * length + 1) : at - count * length]
        differ = np.flatnonzero(before != block[length - len(before) :])
        part = len(before) - 1 - int(differ[-1]) if len(differ) else len(before)
        runs.append(Run(at, length, count, part))
        free, there = at, there + 2 * length


def _inserted(shallow: np.ndarray, deeper: np.ndarray) -> int:
    """The length of the block that stands twice at the start of ``deeper``, chosen so that the rest of
    ``deeper`` equals ``shallow`` for as long as possible.

    Raises:
        NotAlike: ``deeper`` begins with no such block.
    """
    lengths = np.arange(1, (len(deeper) - len(shallow)) // 2 + 1)
    if len(shallow):
        lengths = lengths[deeper[2 * lengths] == shallow[0]] if len(lengths) else lengths
    else:
        lengths = lengths[2 * lengths == len(deeper)]
    best, inserted = 0, 0
    for length in lengths[deeper[lengths] == deeper[0]].tolist() if len(lengths) else []:
        if np.array_equal(deeper[:length], deeper[length : 2 * length]):
            alike = in_common(shallow, deeper[2 * length :]) + 1
            if alike > best:
                best, inserted = alike, length
    if not inserted:
        raise NotAlike("a list has more than two like blocks with two layers more")
    return inserted


class DeepList:
    """The list of a deeper model, worked out from the lists of two shallow models.

    Args:
        shallow, deeper: the lists of models of n and n + 2 layers.

    Attributes:
        counterpart: for each entry of the deeper list, the entry in its place in the shallower list; -1 for
            an entry of the two blocks by which a run is longer.

    Raises:
        NotAlike: the two lists do not determine a deeper model's list.
    """

    def __init__(self, shallow: Listed, deeper: Listed):
        self._runs = runs_of(shallow.tokens, deeper.tokens)
        self._shallow, self._deeper = shallow, deeper
        # for each entry: its place in the first block of its run, the number of its block (-1: the part
        # before the first block), and its run (-1: no run); the shallower list's in terms of the deeper's
        self._base, self._block = np.arange(len(deeper)), np.zeros(len(deeper), dtype=np.int64)
        self._run = np.full(len(deeper), -1)
        base, block = np.arange(len(shallow)), np.zeros(len(shallow), dtype=np.int64)
        self.counterpart = np.arange(len(deeper))
        #: for each run, its first entry in the deeper list
        self._starts: list[int] = []
        for number, run in enumerate(self._runs):
            more = 2 * run.length
            start = run.start + 2 * sum(each.length for each in self._runs[:number])
            self._starts.append(start)
            end = start + run.blocks * run.length + more
            for bases, blocks, first, last in (
                (self._base, self._block, start, end),
                (base, block, run.start, run.end),
            ):
                place = np.arange(-run.part, last - first)
                bases[first - run.part : last] = start + place % run.length
                blocks[first - run.part : last] = place // run.length
            self._run[start - run.part : end] = number
            base[run.end :] += more
            self.counterpart[end:] -= more
            self.counterpart[start:end] = -1
        self._refers = deeper.references >= 0
        self._target, self._of_block = self._base[deeper.references], self._block[deeper.references]
        #: for each run, the first of the two blocks without counterparts; further blocks are its copies
        self._copied = [self._split(number, shallow.references, base) for number in range(len(self._runs))]
        self._refer(shallow.references, base, block)

    def _split(self, number: int, references: np.ndarray, base: np.ndarray) -> slice:
        """Decide which blocks of a run have counterparts in the shallower list (some first and some last
        blocks); returns the entries of the first block without a counterpart."""
        run, start = self._runs[number], self._starts[number]
        shallow = np.arange(run.start, run.end)
        targets = np.where(references[shallow] >= 0, base[references[shallow]], -1)
        for after in sorted(range(run.blocks + 1), key=lambda after: abs(2 * after - run.blocks)):
            copied = start + (run.blocks - after) * run.length
            here = start + np.arange(len(shallow))
            here[here >= copied] += 2 * run.length
            if np.array_equal(targets, np.where(self._refers[here], self._target[here], -1)):
                self.counterpart[here] = shallow
                return slice(copied, copied + run.length)
        raise NotAlike("blocks refer to other entries with two layers more")

    def _refer(self, references: np.ndarray, base: np.ndarray, block: np.ndarray) -> None:
        """Set how the block to which an entry refers depends on the number of layers and on its own block."""
        has = self._refers & (self.counterpart >= 0)
        there = references[self.counterpart[has]]
        more = self._of_block[has] - block[there]
        same = (there >= 0).all() and np.array_equal(base[there], self._target[has])
        if not same or not np.isin(more, (0, 2)).all():
            raise NotAlike("entries refer to other entries with two layers more")
        #: by how much the number of the referred block grows with each layer, and from one block to the next
        self._by_layer, self._by_block = (np.zeros(len(self._deeper), dtype=np.int64) for _ in range(2))
        self._by_layer[has] = more // 2
        for copied, run in zip(self._copied, self._runs, strict=True):
            here = np.arange(copied.start, copied.stop)[self._refers[copied]]
            after = here + run.length
            by_block = self._of_block[after] - self._of_block[here]
            if not np.array_equal(self._target[here], self._target[after]):
                raise NotAlike("like blocks refer to other entries")
            if not np.isin(by_block, (-1, 0, 1)).all():
                raise NotAlike("like blocks refer to blocks further away each time")
            self._by_block[here] = by_block
            # blocks in reverse count from the last layer on, others from the first
            self._by_layer[here] = by_block < 0

    def growth(self, of_shallow: np.ndarray, of_deeper: np.ndarray) -> np.ndarray:
        """[rows of the deeper list]: by how much a column grows with two layers more; 0 without a
        counterpart."""
        both = (self.counterpart >= 0) & ~self._deeper.is_mark
        row, row_there = self._deeper.source[both], self._shallow.source[self.counterpart[both]]
        growth = np.zeros(of_deeper.shape, dtype=np.float64)
        growth[row] = of_deeper[row].astype(np.float64) - of_shallow[row_there]
        return growth

    def by(self, layers: int) -> Order:
        """The list of a model with ``layers`` layers more than the shallower model, as copies of the deeper
        list's entries.

        Raises:
            NotAlike: an entry would refer to a block that does not exist.
        """
        pieces, copies, first = [], [], 0
        begins = np.arange(len(self._deeper))  # each entry's place in its run's first block, in the new list
        for start, copied, run in zip(self._starts, self._copied, self._runs, strict=True):
            pieces += [np.arange(first, copied.start), np.tile(np.arange(copied.start, copied.stop), layers)]
            copies += [np.zeros(copied.start - first, int), np.repeat(np.arange(layers), run.length)]
            first = copied.stop + run.length
            begins[start + (run.blocks + 2) * run.length :] += (layers - 2) * run.length
        pieces.append(np.arange(first, len(self._deeper)))
        copies.append(np.zeros(len(self._deeper) - first, int))
        like, copy = np.concatenate(pieces), np.concatenate(copies)
        # of the run in which each referred entry lies; the last value is for entries in no run
        target, run_of = self._target, self._run[self._target]
        lengths = np.array([*(run.length for run in self._runs), 0])[run_of]
        ends = np.array([*(run.blocks + layers for run in self._runs), 1])[run_of]
        parts = np.array([*(run.part for run in self._runs), 0])[run_of]
        place = target - np.array([*self._starts, 0])[run_of]
        block = self._of_block + self._by_layer * (layers - 2)
        # only the copies of entries that refer to another entry
        refers = np.flatnonzero(self._refers[like])
        of = like[refers]
        block = block[of] + self._by_block[of] * copy[refers]
        if ((block * lengths[of] + place[of] < -parts[of]) | (block >= ends[of])).any():
            raise NotAlike("an entry refers to a block that is not there")
        references = np.full(len(like), -1)
        references[refers] = begins[target[of]] + block * lengths[of]
        return self._deeper.order(like, references)
