"""The findings of a log: operations with their times, in one form for the logs of all programs.

:func:`check_plausible` refuses logs of different cards, of another card than the cluster's, or with a speed
above the card's datasheet. The check covers all kinds of logs, also those of plug-ins.
"""

import gzip
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self

from spbench.bench import measure
from spbench.bench.errors import UserError
from spbench.bench.files import read_file
from spbench.bench.tools.calibrate import LOGS
from spbench.bench.yaml_files import read_yaml
from spbench.impls import WIRE_SHARE

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class LogFile:
    """A log file with its unpacked content."""

    path: Path
    content: bytes

    @cached_property
    def text(self) -> str:
        """The content as UTF-8; bytes that are not UTF-8 become a mark."""
        return self.content.decode(errors="replace")

    def damaged(self, problem: str) -> UserError:
        """A UserError that names the file and the ``problem`` with it."""
        return UserError(f"{self.path}: {problem}")


def log_table(module: str) -> Any:
    """The YAML file of a kind of log, as an object with an attribute for each key and for each regular
    expression under ``patterns``, in which the entry NAME of ``parts`` replaces <NAME>. ``module``: the path
    of the reader's Python file, with the same name."""
    table = read_yaml(Path(module).with_suffix(".yaml"))
    patterns = table.pop("patterns")
    for name, part in table.pop("parts", {}).items():
        patterns = {each: text.replace(f"<{name}>", part) for each, text in patterns.items()}
    compiled = {name: re.compile(text, re.MULTILINE) for name, text in patterns.items()}
    return SimpleNamespace(**table, **compiled)


@dataclass(frozen=True)
class TimedMatmul:
    """A matmul with its time; ``nbytes``: the bytes of both operands and of the result."""

    precision: measure.Precision
    flops: float
    nbytes: float
    seconds: float

    @classmethod
    def of_shape(
        cls, precision: measure.Precision, m: int, n: int, k: int, seconds: float, batch: int = 1
    ) -> Self:
        """The matmul [M, K] x [K, N] that is done ``batch`` times in ``seconds``."""
        size = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}[precision]
        return cls(precision, 2.0 * batch * m * n * k, size * batch * (m * k + k * n + m * n), seconds)


@dataclass(frozen=True)
class AttentionSpeed:
    """The FLOPs per second of an attention kernel at one length, where only FLOPs that the mask leaves count;
    :class:`AttentionRate` describes the other fields."""

    kernel: measure.AttentionKernel
    head_size: int
    mask: measure.Mask
    direction: measure.Direction | None
    length: int
    flops_per_s: float


@dataclass(frozen=True)
class TimedPass:
    """The bytes that a kernel reads and writes, if it does little else, and the seconds of the kernel."""

    nbytes: float
    seconds: float


@dataclass(frozen=True)
class TimedCollective:
    """A collective over the ranks of a group, with its time.

    Attributes:
        collective: a name in :data:`RatedCollective`, or "send" for a message round the ring of all ranks.
        nodes: the number of nodes, each with equally many of the ranks.
        nbytes: the bytes of the payload, as ``WIRE_SHARE`` counts them.
    """

    collective: str
    ranks: int
    nodes: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Findings:
    """The figures that a log has.

    Attributes:
        about: the program that wrote the log, for the sources of figures: "all_reduce_perf of nccl-tests".
        card: the log's name of the device; "" if the log names none.
        memory_total_bytes: the bytes of the card's memory.
        launch_gaps_s: seconds from the end of a kernel to the start of the next kernel of a stream.
        remarks: parts of the log that were passed over, with the reason, one line each.
    """

    about: str
    card: str = ""
    memory_total_bytes: int | None = None
    matmuls: Sequence[TimedMatmul] = ()
    attention: Sequence[AttentionSpeed] = ()
    passes: Sequence[TimedPass] = ()
    launch_gaps_s: Sequence[float] = ()
    collectives: Sequence[TimedCollective] = ()
    remarks: Sequence[str] = ()


def findings_of(path: Path) -> Findings:
    """The figures of a log, read by the kind of log that recognizes the file's content.

    Raises:
        UserError: the file cannot be read, is empty or damaged, or is of no kind or of several kinds.
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
    by_kind = {name: each for name in LOGS.names() if (each := LOGS.load(name)(log)) is not None}
    if len(by_kind) != 1:
        what = f"is a log of {' and of '.join(by_kind)}" if by_kind else "no kind of log that can be read"
        raise log.damaged(f"{what} (choices: {', '.join(LOGS.names())})")
    findings: Findings = next(iter(by_kind.values()))
    return findings


#: the largest speed over the datasheet's that rounding explains; a larger one is of another card
ROUNDING = 1.02
#: a switch that adds the messages that pass it (NVLink SHARP) halves the bytes that a rank sends
_IN_SWITCH = 2.0
#: the precisions of attention kernels
_HALF = ("fp16", "bf16")

_WORD = re.compile(r"[A-Z0-9]+")
#: a card's model, such as H100, L40S, 4090, GB200, MI300X
_MODEL = re.compile(r"(?!SXM|HBM|PCIE)[A-Z]{0,4}\d{2,4}[A-Z]?")
_GIGABYTES = re.compile(r"\b(\d+) ?GB\b")


@dataclass(frozen=True)
class _Datasheet:
    """The rates on a card's datasheet, which measured rates cannot exceed; None: not known.

    Attributes:
        name: the name of the cluster or of the card.
        flops_per_s: the peak FLOPs per second, by precision.
        node_link: the bytes per second that a card sends within a node.
    """

    name: str
    flops_per_s: Mapping[str, float | None]
    memory_bytes_per_s: float | None
    node_link: float | None = None


def check_plausible(findings: Mapping[str, Findings], base: measure.Cluster | None) -> None:
    """Refuse logs, by the names of their files, that cannot be of one card, or of the base's card.

    Args:
        base: the cluster that the figures of the logs extend; None: if a packaged cluster has the card that
            the logs name, the datasheet of this card counts.

    Raises:
        UserError: the error names the file, the figure in the file, and the limit.
    """
    card = one_card(findings)
    if base and card and not is_same_card(card, base.device.name):
        raise UserError(
            f"the logs come from {card}, and {base.name} has {base.device.name}; "
            "--extends a cluster of that card, or leave --extends out"
        )
    datasheet = _of_cluster(base) if base else _of_card(card)
    for path, each in findings.items():
        for value in _times(each):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{path} ({each.about}): a time of {value:g} s cannot be")
        for value, limit, unit, what in _speeds(each, datasheet):
            if limit is not None and value > ROUNDING * limit:
                scale = 1e12 if unit == "TFLOP/s" else 1e9
                raise UserError(
                    f"{path} ({each.about}): {value / scale:.4g} {unit} of {what} is above the "
                    f"{limit / scale:.4g} of {datasheet.name}; is it another card, or another unit?"
                )


def one_card(findings: Mapping[str, Findings]) -> str:
    """The card that the logs name; "" if no log names a card. UserError if the logs name several cards."""
    cards = {each.card: path for path, each in findings.items() if each.card}
    if len(cards) > 1:
        raise UserError(f"logs of several cards: {', '.join(f'{c} ({path})' for c, path in cards.items())}")
    return next(iter(cards), "")


def is_same_card(a: str, b: str) -> bool:
    """Whether two names can be of one card, because model, memory and form are equal if both names have them.
    Drivers write "NVIDIA A100-SXM4-80GB", cluster files "NVIDIA A100 SXM4 80 GB"."""
    one, other = _described(a), _described(b)
    return all(x == y for x, y in zip(one, other, strict=True) if x and y)


def _described(name: str) -> tuple[str, str, str]:
    """The model, the gigabytes and the form (PCIE or SXM) in a card's name, each "" if the name lacks it."""
    upper = name.upper()
    words = _WORD.findall(upper)
    sizes = _GIGABYTES.findall(upper)
    model = next((word for word in words if _MODEL.fullmatch(word) and word not in sizes), "")
    form = next((form for form in ("PCIE", "SXM") if form in upper), "")
    return model, sizes[0] if sizes else "", form


def _of_cluster(cluster: measure.Cluster) -> _Datasheet:
    device = cluster.device
    link = cluster.node_link.bandwidth_bytes_per_s.value if cluster.node_link else None
    peaks = {str(name): each.value for name, each in device.peak_flops_per_s.items()}
    return _Datasheet(cluster.name, peaks, device.memory_bandwidth_bytes_per_s.value, link)


@cache
def _of_card(card: str) -> _Datasheet:
    """The datasheet of a card, from the first packaged cluster that has it, without the cluster's links; a
    datasheet without figures if no cluster has the card."""
    for cluster in map(measure.load_cluster, measure.cluster_names() if _described(card)[0] else ()):
        if _described(cluster.device.name)[0] and is_same_card(card, cluster.device.name):
            return replace(_of_cluster(cluster), name=cluster.device.name, node_link=None)
    return _Datasheet(card, {}, None)


def _times(findings: Findings) -> Iterator[float]:
    for timed in (findings.matmuls, findings.passes, findings.collectives):
        yield from (each.seconds for each in timed)
    yield from (each.flops_per_s for each in findings.attention)


def _speeds(
    findings: Findings, datasheet: _Datasheet
) -> Iterator[tuple[float, float | None, Literal["TFLOP/s", "GB/s"], str]]:
    """The speeds of a log, each as (speed, the card's limit, unit for messages, words on the operation); the
    speed and limit are in FLOPs or bytes per second. Passes over memory are left out: caches are faster."""
    for product in findings.matmuls:
        limit = datasheet.flops_per_s.get(product.precision)
        yield product.flops / product.seconds, limit, "TFLOP/s", product.precision
    half = max((datasheet.flops_per_s.get(name) or 0.0 for name in _HALF), default=0.0) or None
    for attention in findings.attention:
        words = f"{attention.kernel}, {attention.mask}, {attention.direction or 'both'}"
        yield attention.flops_per_s, half, "TFLOP/s", f"{words} at {attention.length} tokens"
    for each in findings.collectives:
        value = float(WIRE_SHARE[each.collective](each.ranks)) * each.nbytes / each.seconds
        what = f"{each.collective} of {each.nbytes} bytes on {each.ranks} ranks"
        limits = [datasheet.memory_bytes_per_s]
        if each.nodes == 1 and datasheet.node_link is not None:
            limits.append(_IN_SWITCH * datasheet.node_link)
        yield value, min(filter(None, limits), default=None), "GB/s", what
