"""The builder of a step program, which writes the program event by event."""

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import numpy as np

from spbench.bench.measure.simulator.program import (
    ALIGNED,
    COMPUTE_STREAM,
    HOST_WORK,
    PRECISION_NAMES,
    Category,
    Group,
    Kind,
    Program,
)
from spbench.impls import EVERYONE

#: (kind, name, category, nbytes, flops, precision, (batch, m, n, k), strided, aligned, host, partner); host
#: is a row of :attr:`Program.host` packed into one number, see VIEW
EventRow = tuple[int, int, int, float, float, int, tuple[int, int, int, int], float, int, int, int]
#: the first fields of a kernel's row, without host and partner
KernelRow = tuple[int, int, int, float, float, int, tuple[int, int, int, int], float, int]
NO_SHAPE = (0, 0, 0, 0)

_BITS = 15
#: one unit of each kind of HOST_WORK, to be added to :attr:`ProgramBuilder.host_work`
VIEW, NODE, MODULE, JOIN, CHECK = (1 << _BITS * number for number in range(len(HOST_WORK)))
_SHIFTS = _BITS * np.arange(len(HOST_WORK))


class ProgramBuilder:
    """Writes a program event by event; methods return the event's index.

    Args:
        mesh: ranks along each axis, from the slowest-varying to the fastest.
    """

    def __init__(self, mesh: Sequence[int]):
        self.mesh = tuple(mesh)
        self.rows: list[EventRow] = []
        self.marks: list[tuple[str, int]] = []
        #: (stream, its first event), for each change of the stream on which events are issued
        self.switches: list[tuple[int, int]] = [(COMPUTE_STREAM, 0)]
        #: (value of :attr:`Program.whose`, its first event), for each change
        self.works: list[tuple[int, int]] = [(EVERYONE, 0)]
        #: see :attr:`Program.unpriced`
        self.unpriced: set[str] = set()
        #: see :attr:`Program.lines`
        self.lines: dict[int, str] = {}
        #: the host's work since the last event, packed into one number
        self.host_work = 0
        self._names: dict[str, int] = {}
        self._groups: dict[Group, int] = {}
        self._peers: dict[tuple[int, ...], int] = {}

    def named(self, name: str) -> int:
        """The index of a name among the program's names."""
        return self._names.setdefault(name, len(self._names))

    def phase(self, name: str) -> None:
        """Begin a phase of the step."""
        self.marks.append((name, len(self.rows)))

    def on_stream(self, stream: int) -> None:
        """Issue the next events on ``stream``."""
        self.switches.append((stream, len(self.rows)))

    def work_of(self, whose: int) -> None:
        """Assign the next events to the ranks ``whose``; see :attr:`Program.whose`."""
        self.works.append((whose, len(self.rows)))

    def kernel(
        self,
        name: str,
        *,
        flops: float = 0,
        nbytes: float = 0,
        precision: str = "fp32",
        category: int = Category.MEMORY_BOUND,
        strided: float = 0,
        aligned: int = ALIGNED,
        shape: tuple[int, int, int, int] = NO_SHAPE,
    ) -> int:
        """Write down a kernel: an operator that the device computes."""
        number = PRECISION_NAMES.index(precision)
        priced = (category, nbytes, flops, number, shape, strided, aligned)
        self.add_kernel((Kind.KERNEL, self.named(name), *priced))
        return len(self.rows) - 1

    def add_kernel(self, row: KernelRow) -> None:
        """Write down a kernel from its row. The host waits for its device before and after an update on its
        cores or a read of a tensor."""
        join = JOIN if row[2] in (Category.HOST_UPDATE, Category.HOST_READ) else 0
        self.rows.append((*row, self.host_work + join, -1))
        self.host_work = join

    def collective(self, name: str, nbytes: float, group: Group) -> int:
        """Begin a collective of a group."""
        partner = self._groups.setdefault(group, len(self._groups))
        return self._communicate(Kind.COLLECTIVE, name, nbytes, partner)

    def send(self, nbytes: float, to: tuple[int, ...]) -> int:
        """Begin a send to the rank at the offset ``to`` (see :func:`offset`)."""
        return self._communicate(Kind.SEND, "send", nbytes, self._peer(to))

    def recv(self, nbytes: float, source: tuple[int, ...]) -> int:
        """Begin a receive from the rank at the offset ``source`` (see :func:`offset`)."""
        return self._communicate(Kind.RECV, "recv", nbytes, self._peer(source))

    def wait(self, event: int) -> int:
        """Let the current stream wait for the end of a communication, or for a record of another stream."""
        return self._communicate(Kind.WAIT, "wait", 0, event)

    def record(self) -> int:
        """Mark a point of the current stream for which another stream may wait."""
        return self._communicate(Kind.RECORD, "record", 0, -1)

    def _peer(self, by: tuple[int, ...]) -> int:
        by = tuple(d % n for d, n in zip(by, self.mesh, strict=True))
        return self._peers.setdefault(by, len(self._peers))

    def _communicate(self, kind: int, name: str, nbytes: float, partner: int) -> int:
        unpriced = (Category.MEMORY_BOUND, nbytes, 0.0, len(PRECISION_NAMES) - 1, NO_SHAPE, 0.0, ALIGNED)
        self.rows.append((kind, self.named(name), *unpriced, self.host_work, partner))
        self.host_work = 0
        return len(self.rows) - 1

    def program(self) -> Program:
        """The program that was written so far."""
        shapes = chain.from_iterable(map(itemgetter(6), self.rows))
        return Program(
            mesh=self.mesh,
            kind=self._column(0, np.int8),
            stream=self._noted(self.switches, np.int8),
            whose=self._noted(self.works, np.int32),
            name=self._column(1, np.int32),
            category=self._column(2, np.int8),
            nbytes=self._column(3, np.float64),
            flops=self._column(4, np.float64),
            precision=self._column(5, np.int8),
            shape=np.fromiter(shapes, np.int64, 4 * len(self.rows)).reshape(-1, 4),
            strided=self._column(7, np.float64),
            aligned=self._column(8, np.int8),
            host=(self._column(9, np.int64)[:, None] >> _SHIFTS & (1 << _BITS) - 1).astype(np.int16),
            partner=self._column(10, np.int64),
            names=tuple(self._names),
            groups=tuple(self._groups),
            peers=tuple(self._peers),
            marks=tuple(self.marks),
            unpriced=tuple(sorted(self.unpriced)),
            lines=self.lines,
        )

    def _noted(self, changes: Sequence[tuple[int, int]], dtype: type) -> np.ndarray:
        """[rows]: the value of each row, from ``changes`` as (value, the first row with this value)."""
        what, first = zip(*changes, strict=True)
        lengths = np.diff(first, append=len(self.rows))
        return np.repeat(np.array(what, dtype=dtype), lengths)

    def _column(self, index: int, dtype: type) -> np.ndarray:
        """One field of all rows, without a list in between: a large program has millions of rows."""
        return np.fromiter(map(itemgetter(index), self.rows), dtype, len(self.rows))
