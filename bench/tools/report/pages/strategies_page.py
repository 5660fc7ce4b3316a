"""A page of all strategies, and a page of each."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure import Verdict, changed_parts, commit_of, read_rows, read_verdicts, verified_code
from spbench.bench.row import Row
from spbench.bench.tools.papers.reproductions import LAYERS, read_trace
from spbench.bench.tools.report import report_markdown as md
from spbench.bench.tools.report import strategy_numbers as numbers
from spbench.bench.tools.report.gathered import CellResult, Gathered
from spbench.bench.tools.report.page import DataTable, Page, Part
from spbench.impls.registries import absent, peers, strategies
from spbench.impls.strategies.base import Strategy
from spbench.plots.style import model_name, strategy_name

GROUP = "Strategies"
#: statuses of cells that a strategy has run
_RAN = ("ok", "oom", "mismatch")
#: what makes rows and traces anew
_MAKE = "`spbench reproduce strategies --write`"

_ROLE = re.compile(r"(?::[a-z]+:)?`{1,2}([^`]+)`{1,2}")
_ARXIV = re.compile(r"arXiv:? ?(\d{4}\.\d{4,5})")
_GITHUB = re.compile(r"(?<![\w/])((?:github\.com|docs\.pytorch\.org)/[\w./-]*[\w/])")


def pages(gathered: Gathered) -> Iterator[Page]:
    """strategies.html, and strategy-NAME.html of each strategy."""
    classes = dict(sorted(strategies().items()))
    verdicts = read_verdicts(gathered.results / "verification")
    yield _all(gathered, classes, verdicts)
    for cls in classes.values():
        yield _one(gathered, cls, verdicts)


def docstring(text: str) -> str:
    """A docstring, or a line of one, as Markdown: its code marked, its papers and repositories linked."""
    text = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", _ROLE.sub(r"`\1`", inspect.cleandoc(text)))
    return _GITHUB.sub(r"[\1](https://\1)", text)


# -- all of them -----------------------------------------------------------------------------------------


def _all(gathered: Gathered, classes: Mapping[str, type[Strategy]], verdicts: Sequence[Verdict]) -> Page:
    lines = [
        {
            "strategy": f"{md.link(strategy_name(name), f'strategy-{name}.html')} ({md.code(name)})",
            **_about(cls),
            "verification": _verified([verdict for verdict in verdicts if verdict["strategy"] == name]),
            "cells in results": len(numbers.uses(name, gathered.cells)),
        }
        for name, cls in classes.items()
    ]
    of_peers = [
        {
            "peer": md.plain(name),
            **_about(cls),
            "package": f"{', '.join(cls.requires)}{' (not installed here)' * bool(absent(cls.requires))}",
        }
        for name, cls in sorted(peers().items())
    ]
    return Page(
        "strategies.html",
        "Strategies",
        "strategies.md",
        {"strategies": md.markdown_table(lines), "peers": md.markdown_table(of_peers)},
        GROUP,
        30,
        "Strategies that divide the training of one sequence among several devices.",
        "All strategies",
    )


def _about(cls: type[Strategy]) -> dict[str, str]:
    """What a strategy is, in cells of a table."""
    about = {"what it does": docstring(cls.summary), "source": docstring(cls.source)}
    escaped = {name: text.replace("|", "\\|") for name, text in about.items()}
    return escaped | {"mesh axes": ", ".join(cls.axes)}


def _verified(own: Sequence[Verdict]) -> str:
    """How verification ended; green only of the present code."""
    counted = numbers.count_by_status(own)
    if not own:
        return md.marked("unjudged", "not run")
    if counted["red"]:
        return md.marked("bad", f"{counted['red']} red")
    green = f"{counted['green']} green"
    if _is_of_this_code(own):
        return md.marked("good", green)
    return md.marked("unjudged", f"{green}, of earlier code")


def _is_of_this_code(own: Sequence[Verdict]) -> bool:
    return {verdict["code"] for verdict in own} == {verified_code()}


# -- one of them -----------------------------------------------------------------------------------------


def _one(gathered: Gathered, cls: type[Strategy], verdicts: Sequence[Verdict]) -> Page:
    name, title = cls.name, strategy_name(cls.name)
    ran = [row for row in gathered.strategy_rows if row["status"] in _RAN]
    row = next((row for row in ran if row["cell"]["strategy"] == name), None)
    cells = numbers.uses(name, gathered.cells)
    return Page(
        f"strategy-{name}.html",
        title[:1].upper() + title[1:],
        "strategy.md",
        {
            "facts": _facts(cls),
            "about": docstring(sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""),
            "layers": _layers(gathered, name),
            "bytes": _bytes(row, cells),
            "verification": _verification(name, verdicts, str(gathered.results)),
            "memory": _memory(row, ran),
            "uses": _uses(name, cells),
        },
        GROUP,
        31,
        f"{cls.summary[:1].upper()}{cls.summary[1:]}.",
    )


def _facts(cls: type[Strategy]) -> str:
    facts = {
        "Name": md.code(cls.name),
        "Source": docstring(cls.source),
        "Mesh axes": ", ".join(cls.axes) or "none: one device",
        "Composes": f"around another strategy, as {md.code(f'{cls.name}+NAME')}" if cls.can_enclose else "",
        "Options": ", ".join(f"{md.code(f.name)} ({md.plain(f.default)})" for f in fields(cls.options_type)),
    }
    return md.listed(f"{what}: {text}" for what, text in facts.items() if text)


def _at(cell: Cell) -> str:
    """The model and the shape of a cell, in words."""
    return f"{model_name(cell.model)}, batch {cell.batch}, {cell.seq_len:,} positions, {cell.precision}"


def _made(row: Row, cell: Cell) -> str:
    """The commit and the day that a row was made, and what has changed since."""
    commit = f"{commit_of(row) or 'unknown'} on {str(row.get('time') or 'an unknown day')[:10]}"
    changed = changed_parts(cell, row)
    since = f"; **since then there have been changes of: {', '.join(changed)}** ({_MAKE} makes it anew)"
    return f"From commit {md.code(commit)}{since if changed else ''}."


def _layers(gathered: Gathered, name: str) -> Iterator[Part]:
    """The timelines of one layer from the kept traces, one for each choice of the strategy's options."""
    rows = read_rows(gathered.strategies / LAYERS)[0]
    cells = [(row, Cell.model_validate(row["cell"])) for row in rows]
    traces = [
        (row, cell, read_trace(gathered.strategies, cell)) for row, cell in cells if cell.strategy == name
    ]
    if not any(trace for _, _, trace in traces):
        yield f"""### One layer {{#layer}}

There is no trace of a layer of it: a line in `scenarios/layers.yaml` and {_MAKE} make one."""
    for row, cell, trace in traces:
        if trace is None:
            continue
        ranks, of = cell.sizes.world, "-".join(["", *map(str, cell.strategy_options.values())])
        options = "".join(f", {option} {value}" for option, value in cell.strategy_options.items())
        on, mesh = f"{ranks} rank{'s' * (ranks > 1)}{options}", md.code(cell.mesh_text)
        yield f"""### One layer on {on} {{#layer{of}}}

A simulated training step of {_at(cell)}, with one layer and a small vocabulary, on the mesh
{mesh} of the cluster {md.code(cell.cluster)}. Each rank has a row of kernels and one or two rows
of communication; lines between rows are messages, light bars are waits. Point at a bar to read its numbers.
{_made(row, cell)}"""
        for phase in ("forward", "backward"):
            yield numbers.layer_drawing(trace, phase, f"layer{of}-{phase}", f"{_at(cell)}, on {on}")
        caption = f"What each rank's time of the step goes to{options}"
        yield DataTable(f"times{of}", caption, numbers.time_lines(trace))
        yield """Communication is exposed where a rank waits while bytes move, hidden where it computes
meanwhile; a bubble is waiting for other ranks."""


def _bytes(row: Row | None, cells: Sequence[CellResult]) -> Iterator[Part]:
    """The strategy's bytes by closed form and by meter, and the cells where these differ."""
    if row is None:
        where = "`scenarios/side_by_side.yaml`"
        yield f"It was not measured beside the others: a line in {where} and {_MAKE} do it."
    else:
        cell, lines = Cell.model_validate(row["cell"]), numbers.formula_lines(row)
        differ = [line for line in lines if line["difference"]]
        yield _made(row, cell)
        if differ:
            words = (
                f"{line['phase']} {line['collective']} on {line['axis'] or 'no axis'}: "
                f"{md.shown(line['metered (bytes)'])} bytes metered, "
                f"{md.shown(line['closed form (bytes)'])} by the closed form."
                for line in differ
            )
            yield f"{md.marked('bad', f'{len(differ)} of {len(lines)} entries differ.')} {' '.join(words)}"
        elif lines:
            word = "unjudged" if changed_parts(cell, row) else "good"
            yield md.marked(word, "Every entry is equal, exactly.")
        else:
            yield "It sends nothing."
        if lines:
            layers = cell.model_options.get("layers")
            yield f"""A training step of {layers} layers with the default backend, on four ranks. Each run of
a cell makes this comparison; one that differs has the status `mismatch`."""
            yield DataTable("formula", f"Bytes that one rank sends in a training step: {_at(cell)}", lines)
    if wrong := [cell for cell in cells if cell.row["measurement"].get("formula_difference")]:
        keys = md.codes(each.row["key"] for each in wrong[:5]) + ", ..." * (len(wrong) > 5)
        yield f"{md.marked('bad', f'{len(wrong)} of {len(cells)} cells in the results differ:')} {keys}"


def _verification(name: str, verdicts: Sequence[Verdict], results: str) -> Iterator[Part]:
    own = [verdict for verdict in verdicts if name in verdict["strategy"].split("+")]
    folder = f"{results}/verification"
    if not own:
        place, command = md.code(folder), md.code(f"spbench verify --strategy {name} --output {folder}")
        yield f"""There are no verdicts on it in {place}. Outputs and every gradient on every rank are
set beside one device in float64 by {command}."""
        return
    counted = numbers.count_by_status(own)
    mark = "bad" if counted["red"] else "good" if _is_of_this_code(own) else "unjudged"
    facts = [f"{md.marked(mark, str(counted['red']) + ' red')} cases"]
    facts.append(f"**{counted['green']} green** cases")
    facts.append(f"**{counted['unsupported']}** cases that it says it cannot run")
    judged = [verdict for verdict in own if verdict["status"] == "green" and verdict["dtype"] == "fp64"]
    if worst := max(judged, key=lambda verdict: verdict["error"] or 0.0, default=None):
        error, limit = worst["error"] or 0.0, worst["limit"] or 0.0
        facts.append(f"**{error:.1e}** is the largest relative error in float64; {limit:.0e} is allowed")
    yield md.listed(facts)
    yield "Outputs and every gradient on every rank are set beside one device in float64."
    verified = {(v["commit"], v["torch"], v["time"][:10], v["code"] == verified_code()) for v in own}
    yield md.listed(
        f"Verified on {day} with torch {torch} at commit {md.code(md.dated(commit) or 'unknown')}; "
        f"the strategies, models and kernels {'are the same now' if same else 'have changed since'}."
        for commit, torch, day, same in sorted(verified, key=str)
    )
    caption = "Relative errors against one device in float64: the worst tensor of all ranks and cases"
    yield DataTable("verification", caption, numbers.verdict_lines(own), sortable=True)


def _memory(row: Row | None, ran: Sequence[Row]) -> Iterator[Part]:
    """The memory of the strategy's row beside that of all strategies that ran the same model and shape."""
    if row is None:
        yield "It was not measured beside the others."
        return
    cell, shape = Cell.model_validate(row["cell"]), ("model", "batch", "seq_len")
    beside = [each for each in ran if all(each["cell"][of] == row["cell"][of] for of in shape)]
    yield f"""The same model on the same number of ranks, by every strategy that can run it
({cell.model_options.get("layers")} layers, the default backend); `single` has one rank."""
    caption = f"Memory in GiB of the rank that needs most, at its peak, by what holds it: {_at(cell)}"
    yield DataTable("memory", caption, numbers.memory_lines(beside))


def _uses(name: str, cells: Sequence[CellResult]) -> str:
    """The cells of the results that use the strategy, with links to them."""

    def line(of: Mapping[str, Any]) -> str:
        outer = "" if of["strategy"] == name else f" as {md.code(of['strategy'])}"
        count = f"{of['cells']} cell{'s' * (of['cells'] > 1)}"
        return f"{md.link(of['scenario'], of['link'])}{outer}: {count} ({of['of which']})"

    return md.listed(map(line, numbers.scenario_lines(cells))) or "None of the results uses it."
