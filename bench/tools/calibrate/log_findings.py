"""What the log of a benchmark or of a profiler says, whatever wrote it: operations with their times."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.files import read_file
from spbench.bench.measure.clusters.cluster import Precision
from spbench.bench.measure.clusters.rates import AttentionKernel, Direction, Mask
from spbench.bench.tools.calibrate import LOGS

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class LogFile:
    """A file to be read, and its content, unpacked."""

    path: Path
    content: bytes

    @cached_property
    def text(self) -> str:
        """The content as UTF-8; bytes that are none become a mark."""
        return self.content.decode(errors="replace")

    def damaged(self, problem: str) -> UserError:
        """The error that says what is wrong with the file."""
        return UserError(f"{self.path}: {problem}")


@dataclass(frozen=True)
class TimedProduct:
    """A matrix product.

    Attributes:
        nbytes: of both operands and the result.
        seconds: that it took.
    """

    precision: Precision
    flops: float
    nbytes: float
    seconds: float

    @classmethod
    def of_shape(
        cls, precision: Precision, m: int, n: int, k: int, seconds: float, batch: int = 1
    ) -> TimedProduct:
        """The product of [M, K] and [K, N], ``batch`` times."""
        size = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}[precision]
        return cls(precision, 2.0 * batch * m * n * k, size * batch * (m * k + k * n + m * n), seconds)


@dataclass(frozen=True)
class AttentionSpeed:
    """What an attention kernel reached at one length; the fields are those of :class:`AttentionRate`, whose
    FLOPs are those that the mask leaves."""

    kernel: AttentionKernel
    head_size: int
    mask: Mask
    direction: Direction | None
    length: int
    flops_per_s: float


@dataclass(frozen=True)
class TimedPass:
    """A kernel that does little but read and write memory."""

    nbytes: float
    seconds: float


@dataclass(frozen=True)
class TimedCollective:
    """A collective over the ranks of a group.

    Attributes:
        collective: as :data:`RatedCollective` calls it, or "send" for a message round the ring of all ranks.
        nodes: that the ranks are on, each with as many.
        nbytes: the payload, as ``WIRE_SHARE`` counts it.
    """

    collective: str
    ranks: int
    nodes: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Findings:
    """What a log says.

    Attributes:
        about: what wrote it, for the sources of the figures: "all_reduce_perf of nccl-tests".
        card: the device as the log calls it; "" where it does not.
        memory_total_bytes: of the card.
        launch_gaps_s: from the end of a kernel to the start of the next of its stream.
        remarks: what was passed over and why, one a line.
    """

    about: str
    card: str = ""
    memory_total_bytes: int | None = None
    products: Sequence[TimedProduct] = ()
    attention: Sequence[AttentionSpeed] = ()
    passes: Sequence[TimedPass] = ()
    launch_gaps_s: Sequence[float] = ()
    collectives: Sequence[TimedCollective] = ()
    remarks: Sequence[str] = ()


def findings_of(path: Path) -> Findings:
    """What the file says, by the kind of log that knows its content.

    Raises:
        UserError: it cannot be read, is empty or damaged, or is of no kind or several.
    """
    content = read_file(path)
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: damaged gzip: {error}") from error
    log = LogFile(path, content)
    if not content.strip():
        raise log.damaged("is empty")
    found = {name: each for name in LOGS.names() if (each := LOGS.load(name)(log)) is not None}
    if len(found) != 1:
        what = f"is a log of {' and of '.join(found)}" if found else "no kind of log that is known"
        raise log.damaged(f"{what} (known: {', '.join(LOGS.names())})")
    findings: Findings = next(iter(found.values()))
    return findings
