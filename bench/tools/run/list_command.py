"""`spbench list`: the scenarios, strategies, models, clusters and other names that commands take.

Scenarios, clusters, figures and other functions are read from their files; for classes and models the modules
are imported, and torch with them. `spbench list cluster NAME` shows the rates of a cluster by kind of work,
and which rates are not known, or draws the rates that its matmuls, attention kernels and links reach by size,
as a simulation has them.
"""

from __future__ import annotations  # names of the doors, in annotations too, import torch

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click

from spbench.bench import measure
from spbench.bench.command_line.forms import FORMS
from spbench.bench.command_line.options import figure_option, files_of, printed
from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.tools.calibrate import LOGS
from spbench.bench.tools.changes import EXPORTS
from spbench.bench.tools.jobs import JOBS
from spbench.bench.tools.run import listed_classes
from spbench.bench.tools.run.kinds_of_work import GAP, STANDS_IN, kinds_of_work, without_own_rates
from spbench.bench.yaml_files import packaged, read_yaml
from spbench.impls import WIRE_SHARE, FunctionModules
from spbench.plots import FIGURES

COLUMNS = ("work", "figure", "source")


def cluster_output(name: str, figure: Path | None = None) -> Output:
    """The output of `spbench list cluster NAME` for a packaged cluster or a file; UserError if there is none.

    Args:
        figure: the path of a drawing of the rates, as NAME.png, .svg and .pdf; None: nothing is drawn.
    """
    cluster = measure.load_cluster(name)
    files = [] if figure is None else _drawn(cluster, figure)
    kinds = kinds_of_work(cluster)
    lines: list[dict[str, Any]] = [dict(zip(COLUMNS, kind, strict=True)) for kind in kinds]
    gaps = [kind.work for kind in kinds if not kind.known]
    marked, substitutes = [], defaultdict[str, dict[str, None]](dict)
    for kind in kinds:
        reached, stands_in, substitute = kind.figure.partition(f" ({STANDS_IN}: ")
        if stands_in:
            substitutes[substitute.removesuffix(")")][kind.work] = None
        reached += " *" if stands_in else ""
        marked.append(dict(zip(COLUMNS, kind._replace(figure=reached), strict=True)))
    notes = [f"without a figure: {'; '.join(gaps)}"] if gaps else []
    notes += [f"* {STANDS_IN}, but {whose}: {'; '.join(of)}" for whose, of in substitutes.items()]
    usable = cluster.usable_memory_bytes
    memory = "no limit of memory" if usable is None else f"{usable / 2**30:.1f} GiB for tensors"
    node = f"{cluster.devices_per_node} a node, network cards: {cluster.network.nics_per_node}"
    return Output(
        [
            f"{cluster.name}: {cluster.about}",
            f"{cluster.device.name}, {memory}; {node}",
            Table("", marked, COLUMNS, ("figure",), {i: GAP for i, of in enumerate(kinds) if not of.known}),
        ],
        {"cluster": cluster.model_dump(mode="json"), "kinds_of_work": lines, "gaps": gaps},
        lines,
        COLUMNS,
        notes=notes,
        files=files,
    )


def _drawn(cluster: measure.Cluster, figure: Path) -> list[Path]:
    """Draw a cluster's rates; return the paths of the files. UserError if the cluster has no rates, or a file
    cannot be written."""
    from spbench.plots.rates import draw_cluster_rates

    of_kinds = {"size": product_curves, "length": attention_curves, "message": link_curves}
    curves = [curve._asdict() | {"along": along} for along, of in of_kinds.items() for curve in of(cluster)]
    if not curves:
        raise UserError(f"{cluster.name} has no rate that could be drawn; give some in its file")
    try:
        return draw_cluster_rates(curves, f"What {cluster.name} reaches", figure)
    except OSError as error:
        raise UserError(f"cannot write {figure}: {error.strerror}") from error


#: for each kind that is files: the package with the files, and the key of a file whose text describes it
_OF_FILES = {"scenarios": ("spbench.scenarios", "title"), "clusters": ("spbench.scenarios.clusters", "about")}
_OF_FUNCTIONS: dict[str, FunctionModules] = {
    "forms": FORMS,
    "exports": EXPORTS,
    "logs": LOGS,
    "jobs": JOBS,
    "figures": FIGURES,
}
#: all kinds, in the order in which they are printed
_KINDS = (
    *("scenarios", "strategies", "peers", "as-published", "models", "clusters", "backends", "engines"),
    *("meters", "quantities", "answers", "forms", "exports", "logs", "jobs", "figures"),
)
#: the number of entries that the list of all kinds names for each kind
_NAMED = 3
#: the word before the name of one cluster to be shown
_ONE = "cluster"


class _KindOrText(click.Choice[str]):
    """A parameter that is a kind or any other word; another word is searched in the names of all kinds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


@click.command("list")
@click.argument("kind", type=_KindOrText([*_KINDS, _ONE]), required=False, metavar="[KIND]")
@click.argument("text", required=False, metavar="[TEXT]")
@files_of("strategy", "Strategies of this file of yours too.")
@files_of("model", "Models of this file of yours too.")
@figure_option("With `cluster NAME`: draw its rates into this file, as FILE.png, .svg and .pdf.")
@printed
def command(kind: str | None, text: str | None, figure: Path | None) -> Output:
    """List scenarios, strategies, models, clusters and the rest.

    The command lists all of a KIND, or a part of every kind. With TEXT it lists names that contain TEXT:
    `list ring`, `list clusters h100`. `list strategies llama3-8b` lists the strategies that take a model, and
    `list models dsp` the models that a strategy takes. Kinds: scenarios, strategies, peers, as-published
    (published code that computes something else than the model), models, clusters, backends, engines,
    meters, quantities, answers, forms, exports, logs, jobs, figures. `list cluster NAME` shows the rates of
    a cluster by kind of work, each with its source, and the missing rates; NAME may be a file of yours.
    """
    if kind == _ONE:
        if text is None:
            raise UserError("which one? spbench list cluster NAME (spbench list clusters has the names)")
        return cluster_output(text, figure)
    if figure is not None:
        raise UserError("--figure draws one cluster: spbench list cluster NAME --figure FILE.png")
    if kind not in (None, *_KINDS):
        if text is not None:
            raise UserError(f"{shown(kind)} is no kind{suggestion(kind, _KINDS)}")
        kind, text = None, kind
    content = _named([kind] if kind else _KINDS, text)
    paragraphs = [_paragraph(name, of_kind) for name, of_kind in content.items()]
    lines = [
        {"kind": name, "name": entry, "about": about}
        for name, of_kind in content.items()
        for entry, about in of_kind.items()
    ]
    columns = ("kind", "name", "about")
    if kind is None and text is None:
        note = "spbench list KIND has all of a kind, with a line about each"
        return Output([_overview(content)], content, lines, columns, notes=[note], details=paragraphs)
    if kind == "models":
        notes = ["spbench list models TEXT has each whose name has TEXT in it: spbench list models qwen3"]
        tables = listed_classes.tables_of_models([*content[kind]], each=text is not None)
        return Output(tables, content, lines, columns, notes=[] if text is not None else notes)
    return Output(paragraphs, content, lines, columns)


def _named(kinds: Sequence[str], text: str | None) -> dict[str, dict[str, str]]:
    """The line about each entry, by kind and name; with ``text``, only entries whose name contains the text
    (in either case). UserError if no name contains the text."""
    every = {kind: entries(kind) for kind in kinds}
    if text is None:
        return every
    of_kinds = {
        kind: {name: about for name, about in each.items() if text.lower() in name.lower()}
        for kind, each in every.items()
    }
    if named := {kind: each for kind, each in of_kinds.items() if each}:
        return named
    if len(kinds) == 1 and (fitting := listed_classes.that_fit(kinds[0], text)) is not None:
        return {kinds[0]: {name: about for name, about in every[kinds[0]].items() if name in fitting}}
    (of, others) = (f" of {kinds[0]}", []) if len(kinds) == 1 else ("", kinds)
    hint = suggestion(text, [*others, *itertools.chain(*every.values())], f"spbench list{of[3:]}")
    raise UserError(f"no name{of} has {shown(text)} in it{hint}")


def _overview(content: Mapping[str, Mapping[str, str]]) -> Table:
    """A table of the kinds: the number of entries of each kind, and its first three names."""
    lines = [
        {"kind": kind, "": len(of_kind), "such as": ", ".join([*of_kind][:_NAMED])}
        for kind, of_kind in content.items()
        if of_kind
    ]
    return Table("What there is", lines, below=("such as",))


def entries(kind: str) -> dict[str, str]:
    """The line about each entry of a kind, by the entry's name."""
    if kind in _OF_FUNCTIONS:
        return _OF_FUNCTIONS[kind].summaries()
    if kind not in _OF_FILES:
        return listed_classes.of_classes(kind)
    texts = dict(_from_files(*_OF_FILES[kind]))
    return {name: text + _lacking(name) for name, text in texts.items()} if kind == "clusters" else texts


def _lacking(name: str) -> str:
    """A text on the kinds of work for which a cluster has no own rate; "" if none, or its file is wrong."""
    try:
        lacking = without_own_rates(measure.load_cluster(name))
    except UserError:
        return ""
    return f"; without a rate of its own: {', '.join(lacking)}" if lacking else ""


def _from_files(package: str, key: str) -> Iterator[tuple[str, str]]:
    for name, path in packaged(package).items():
        try:
            text: Any = read_yaml(path).get(key, "")
        except UserError as error:
            text = str(error)
        yield name, str(text)


def _paragraph(kind: str, of_kind: Mapping[str, str]) -> str:
    width = max(map(len, of_kind), default=0)
    lines = [f"  {name:<{width}}  {text}".rstrip() for name, text in of_kind.items()]
    return "\n".join([f"{kind}:", *(lines or ["  none"])])


#: n of a matmul [n, n] x [n, n], tokens of a sequence, bytes of a message
SIZES = [2**n for n in range(7, 16)]
LENGTHS = [2**n for n in range(9, 18)]
MESSAGES = [2**n for n in range(14, 34)]
#: the query heads and the key/value heads for which attention rates in a table are drawn
HEADS, GROUPS = 32, 8
_DRAWN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: the numbers of ranks of groups within a node, and the numbers of nodes of larger groups
_RANKS, _NODES = (2, 4, 8, 16, 32, 72), (2, 4, 16, 64)


class RateCurve(NamedTuple):
    """A line, ``name``, of a panel: the simulated rates, in FLOPs or bytes a second, by n of a matmul, tokens
    of a sequence, or bytes of a message; and the ``measured`` rates in the cluster's file, by size."""

    panel: str
    name: str
    sizes: Sequence[int]
    rates: Sequence[float]
    measured: Mapping[int, float] = {}


def product_curves(cluster: measure.Cluster) -> Iterator[RateCurve]:
    """Curves of the FLOPs a second of square matmuls by size, one for each precision that the card has."""
    device, costs = cluster.device, measure.Costs(cluster, measure.Calibration())
    for precision in get_args(measure.Precision):
        peak, own = device.peak_flops_per_s.get(precision), (device.matmul or {}).get(precision)
        if peak is None or peak.value is None:
            continue
        width = 4 if precision == "fp32" else 8 if precision == "fp64" else 2
        program = measure.ProgramBuilder((1,))
        for n in SIZES:
            work = {"flops": 2.0 * n**3, "nbytes": 3.0 * width * n**2}
            of = {"precision": precision, "category": measure.Category.MATMUL, "shape": (1, n, n, n)}
            program.kernel("mm", **work, **of)
        seconds = costs.kernels(program.program()) + costs.launch_s
        rates = [2.0 * n**3 / each for n, each in zip(SIZES, seconds, strict=True)]
        yield RateCurve("Matmuls", precision, SIZES, rates, {} if own is None else _measured(own))


def _measured(rate: measure.MatmulRate | measure.AttentionRate) -> Mapping[int, float]:
    table = rate.table.value
    return rate.measured if table is None else measure.rates_along(table, HEADS, GROUPS)


def attention_curves(cluster: measure.Cluster) -> Iterator[RateCurve]:
    """Curves of the FLOPs a second of attention by sequence length, in a panel for each kernel."""
    attention = cluster.device.attention
    for kernel, rates in attention.kernels.items() if attention is not None else ():
        for rate in rates:
            at = list(map(rate.at, LENGTHS))
            if rate.table.value is not None:
                alike = [
                    measure.AttentionCall("forward", "causal", rate.head_size, HEADS, n, n, n)
                    for n in LENGTHS
                ]
                at = [measure.attention_rate(rate, call, GROUPS) for call in alike]
            values = f"/{rate.value_head_size}" if rate.value_head_size else ""
            name = f"{rate.head_size}{values}, {rate.mask}, {rate.direction or 'both'}"
            yield RateCurve(f"Attention, {kernel}", name, LENGTHS, at, _measured(rate))


def link_curves(cluster: measure.Cluster) -> Iterator[RateCurve]:
    """Curves of bus bandwidth (the bytes a second that a rank sends over the wire) by message size: each
    collective and a send, within a node and on two nodes, and an all-reduce by number of ranks."""
    node, costs = cluster.devices_per_node, measure.Costs(cluster, measure.Calibration())
    within = node > 1 and cluster.node_link is not None and cluster.node_link.known
    between = cluster.network.known and (node == 1 or within)
    panels = {"Within a node": (node, 1)} if within else {}
    for panel, (ranks, peer) in (panels | ({"On two nodes": (2 * node, node)} if between else {})).items():
        for kind in _DRAWN:
            yield _link_curve(panel, kind, _collective(costs, kind, ranks), ranks, kind)
        yield _link_curve(panel, "send", _send(costs, [*range(peer)], peer), 2, "send")
    by_ranks = {f"{n} ranks": n for n in _RANKS if n <= node} if within else {}
    by_ranks |= {f"{n} nodes": n * node for n in _NODES} if between else {}
    for name, ranks in by_ranks.items():
        yield _link_curve("All-reduce by ranks", name, _collective(costs, _DRAWN[0], ranks), ranks, _DRAWN[0])


def _collective(costs: measure.Costs, kind: str, ranks: int) -> Callable[[int], float]:
    return lambda nbytes: costs.collectives(kind, nbytes, [range(ranks)])[0]


def _send(costs: measure.Costs, sources: Sequence[int], peer: int) -> Callable[[int], float]:
    """A function from bytes to the seconds of simultaneous sends, from each rank of ``sources`` to the rank
    ``peer`` places after it."""
    latency, per_byte = costs.transfers(sources, [rank + peer for rank in sources], 1)
    return lambda nbytes: float((latency + per_byte * nbytes).max())


def _link_curve(panel: str, name: str, seconds: Callable[[int], float], ranks: int, kind: str) -> RateCurve:
    share = float(WIRE_SHARE[kind](ranks))
    return RateCurve(panel, name, MESSAGES, [share * nbytes / seconds(nbytes) for nbytes in MESSAGES])
