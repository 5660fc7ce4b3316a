"""Bytes that a GPU sends in a training step, metered by phase, and their deviations from closed forms."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.axes import lost_notes
from spbench.plots.bars import Bar, Segment, bar_width, beside, draw_bars, fill, method_patches
from spbench.plots.claims import DrawnClaim, claims_of, claims_panel
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.series import (
    Row,
    by_model,
    differing_settings,
    engine,
    gpus,
    grouped,
    shared,
    strategy,
    title,
)
from spbench.plots.style import GREY, INK, engine_name, looks, method_look, strategy_name

#: the strength of the strategy's colour by phase; all other phases have a hatch too
_PHASES = {"forward": 1.0, "backward": 0.6, "gradient_sync": 0.25}
_OTHER_STRENGTH, _OTHER_HATCH = 0.25, "...."
#: phases below this part of a panel's highest bar cannot be seen, so that the legend leaves them out
_SEEN = 0.005
#: the relative difference up to which two sums of bytes count as equal
_ROUNDING = 1e-12

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


def sent_bytes(row: Row, source: str, phase: str | None = None) -> float | None:
    """The bytes that a rank sends in a step, in one phase or in all; None if not known.

    Args:
        source: "communication" (metered) or "formula" (the closed form).
    """
    entries = row["measurement"].get(source)
    if row["status"] != "ok" or entries is None:
        return None
    if source == "formula" and not entries and row["measurement"].get("communication"):
        return None
    return float(sum(entry["sent_bytes"] for entry in entries if phase in (None, entry["phase"])))


def deviations(row: Row) -> dict[str, float]:
    """Metered bytes / closed form - 1, for all bytes (key "") and by phase; equal values are left out.

    Empty if one of the two is not known; infinite where the closed form has no bytes.
    """
    if sent_bytes(row, "communication") is None or sent_bytes(row, "formula") is None:
        return {}
    differing = {}
    for phase in (None, *_phases_of([row])):
        metered, formula = (sent_bytes(row, source, phase) or 0.0 for source in ("communication", "formula"))
        if not math.isclose(metered, formula, rel_tol=_ROUNDING):
            differing[phase or ""] = metered / formula - 1 if formula else math.inf
    return differing


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel of bars for each model and setting; claims that are not exactly met are drawn below.

    Args:
        rows: rows whose measurement has ``communication`` and ``formula``.
    """
    claims, facets = claims_of(comparison), []
    notes: list[str] = []
    for name, some in by_model(rows).items():
        for setting, in_panel in sorted(grouped(some, differing_settings(some, ["engine"])).items()):
            facets.append([_panel(name, setting, in_panel, _unit(some))])
            notes += _deviation_notes(", ".join(filter(None, [name, setting])), in_panel)
    return (
        PanelGrid(title(rows, "Bytes sent per GPU and step"), [*_agreement(rows), *_exact(claims), *notes])
        .add(facets, abreast=2)
        .add(claims_panel([claim for claim in claims if claim.relative_error and not _met(claim)]))
    )


def _panel(model: str, setting: str, rows: Sequence[Row], unit: str) -> Panel:
    """The panel of the rows of one model and setting: bars by number of GPUs and strategy."""
    given = {"batch": shared(rows, "batch"), "length": shared(rows, "seq_len")}
    texts = [f"{name} {value}" for name, value in given.items() if value and setting != name]
    return Panel(
        partial(_draw_panel, rows=rows, unit=unit),
        ", ".join(filter(None, [model, setting, *texts])),
        "Number of GPUs",
        f"Sent per GPU and step ({unit})",
        axis="linear",
    )


def _draw_panel(ax: Axes, rows: Sequence[Row], unit: str) -> Drawn:
    """Draw a bar for each row, and a line over the bar at the closed form's bytes."""
    places = {str(count): _in_place(some) for count, some in sorted(grouped(rows, gpus).items())}
    width = bar_width(max(map(len, places.values())))
    bars, formulas = [], []
    for place, some in enumerate(places.values()):
        for at, row in zip(beside(place, len(some), width), some, strict=True):
            bars.append(_bar(row, at, unit))
            formula = sent_bytes(row, "formula")
            if formula is not None:
                formulas.append(formula / _UNITS[unit])
                line = _formula_line([at - 0.5 * width, at + 0.5 * width], [formulas[-1]] * 2)
                line.set_gid(f"formula {_name(row)}")
                ax.add_line(line)
    drawn = draw_bars(ax, bars, list(places), width)
    least = _SEEN * max([0.0, *drawn.values, *formulas])
    seen = {
        phase
        for row in rows
        for phase in _phases_of([row])
        if (sent_bytes(row, "communication", phase) or 0) / _UNITS[unit] > least
    }
    phases = [_phase_patch(phase) for phase in _phases_of(rows) if phase in seen]
    return Drawn(
        method_patches(looks(map(strategy, rows))),
        [*phases, *[_formula_line([], [])] * bool(formulas)],
        drawn.marks,
        [*drawn.values, *formulas],
    )


def _bar(row: Row, at: float, unit: str) -> Bar:
    """The bar of a row: a segment for each phase's bytes, and the deviation from the closed form as text."""
    look = method_look(strategy(row))
    if row["status"] != "ok":
        return Bar([], f"{row['status']} {_name(row)}", "", row["status"], look.color, at)
    segments = [
        Segment(
            (sent_bytes(row, "communication", phase) or 0.0) / _UNITS[unit],
            look.color,
            f"{phase} {_name(row)}",
            look.hatch if phase in _PHASES else _OTHER_HATCH,
            _PHASES.get(phase, _OTHER_STRENGTH),
        )
        for phase in _phases_of([row])
    ]
    off = deviations(row).get("")
    return Bar(segments, _name(row), f"{off:+.2%}" if off else "", at=at)


def _in_place(rows: Sequence[Row]) -> list[Row]:
    """The rows of one number of GPUs that get a bar, strategies in the order of the legend. Engines with the
    same bytes share a bar, which is the virtual engine's if it ran the cell."""
    virtual_first = sorted(rows, key=lambda row: engine(row) != "virtual")
    unlike = {}
    for row in reversed(virtual_first):
        sent = [(phase, sent_bytes(row, "communication", phase)) for phase in _phases_of([row])]
        unlike[strategy(row), *sent] = row
    order = list(looks(map(strategy, rows)))
    return sorted(unlike.values(), key=lambda row: (order.index(strategy(row)), engine(row) != "virtual"))


def _deviation_notes(facet: str, rows: Sequence[Row]) -> Iterator[str]:
    """A note for each row whose bytes differ from its closed form, or that has no bytes, with the reason."""
    named = [
        (f"{facet}, {strategy_name(strategy(row))} at {gpus(row)} GPUs, {engine(row)}", row) for row in rows
    ]
    for name, row in named:
        if differing := deviations(row):
            texts = [f"{off:+.2%} {phase}".replace("_", " ").strip() for phase, off in differing.items()]
            yield f"{name}: {', '.join(texts)}"
    yield from lost_notes(named)


def _name(row: Row) -> str:
    return f"{strategy_name(strategy(row))} {gpus(row)} {engine(row)}"


def _unit(rows: Sequence[Row]) -> str:
    """The name of the largest unit that the row with the most bytes reaches."""
    highest = max(sent_bytes(row, "communication") or 0.0 for row in rows)
    return next((name for name, nbytes in _UNITS.items() if highest >= nbytes), "bytes")


def _phases_of(rows: Sequence[Row]) -> list[str]:
    """The phases in which ranks send bytes, by meter or closed form, in the order of a step."""
    entries = [
        entry
        for row in rows
        for source in ("communication", "formula")
        for entry in row["measurement"].get(source) or []
    ]
    present = {entry["phase"] for entry in entries if entry["sent_bytes"]}
    return [phase for phase in _PHASES if phase in present] + sorted(present - set(_PHASES))


def _phase_patch(phase: str) -> Patch:
    hatch = "" if phase in _PHASES else _OTHER_HATCH
    return Patch(**fill(GREY, hatch, _PHASES.get(phase, _OTHER_STRENGTH)), label=phase.replace("_", " "))


def _formula_line(x: Sequence[float], y: Sequence[float]) -> Line2D:
    return Line2D(x, y, color=INK, linewidth=1.2, zorder=3, label="closed form")


def _agreement(rows: Sequence[Row]) -> Iterator[str]:
    """A note for each engine: the number of its cells that send the closed form's bytes in all phases."""
    for name, some in grouped(rows, lambda row: engine_name(engine(row))).items():
        sums = [(sent_bytes(row, "communication"), sent_bytes(row, "formula")) for row in some]
        compared = [row for row, both in zip(some, sums, strict=True) if None not in both]
        exact = sum(not deviations(row) for row in compared)
        yield f"{exact} of {len(compared)} cells on {name} send exactly the bytes of their closed form"


def _exact(claims: Sequence[DrawnClaim]) -> Iterator[str]:
    """Notes on how many claims are exactly met, and how many have no number of ours."""
    if claims:
        met = sum(map(_met, claims))
        yield f"{met} of {len(claims)} published formulas exactly met"
    if unknown := sum(claim.relative_error is None for claim in claims):
        yield f"{unknown} of {len(claims)} published formulas not measured"


def _met(claim: DrawnClaim) -> bool:
    return claim.relative_error is not None and abs(claim.relative_error) < _ROUNDING


draw = Drawing("communication", _grid)
"""Bytes that a GPU sends in a step by phase, metered and by closed forms."""
