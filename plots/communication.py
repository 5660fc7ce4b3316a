"""Bytes that a GPU sends in a training step: metered by phase, and where that differs from closed forms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.bars import bar_width, beside, mark_missing, name_places
from spbench.plots.claims import DrawnClaim, claims_of
from spbench.plots.drawing import Drawing
from spbench.plots.page import Page
from spbench.plots.panel import lost_notes, value_axis
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
from spbench.plots.style import GREY, INK, Look, looks, strategy_name, tint

_PANEL_INCHES, _PANELS_A_ROW = 2.4, 2

#: phase -> strength of the strategy's colour; all other phases have the hatch too
_PHASES = {"forward": 1.0, "backward": 0.6, "gradient_sync": 0.25}
_OTHER_STRENGTH, _OTHER_HATCH = 0.25, "...."
#: phases with less than this part of a panel's highest bar cannot be seen, and are not in the legend
_SEEN = 0.005
#: relative differences between two sums of the same numbers
_ROUNDING = 1e-12

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


def sent_bytes(row: Row, source: str, phase: str | None = None) -> float | None:
    """Bytes that a rank sent, in one phase or in all; None where that is not known.

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
    """Metered / closed form - 1, of all bytes ("") and by phase, without the phases that agree.

    Empty where one of the two is not known; infinite where the closed form has no bytes.
    """
    if sent_bytes(row, "communication") is None or sent_bytes(row, "formula") is None:
        return {}
    found = {}
    for phase in (None, *_phases_of([row])):
        metered, formula = (sent_bytes(row, source, phase) or 0.0 for source in ("communication", "formula"))
        if not math.isclose(metered, formula, rel_tol=_ROUNDING):
            found[phase or ""] = metered / formula - 1 if formula else math.inf
    return found


def _figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel of bars for each model and setting; claims that are not exactly met are drawn below.

    Args:
        rows: whose measurement has ``communication`` and ``formula``.
    """
    look = looks(map(strategy, rows))
    panels = [
        _Panel(name, setting, in_panel, look, _unit(some))
        for name, some in by_model(rows).items()
        for setting, in_panel in sorted(grouped(some, differing_settings(some, ["engine"])).items())
    ]
    claims = claims_of(comparison)
    lost = [row for row in rows if row["status"] != "ok"]
    page = Page(
        title(rows, "Bytes sent per GPU and step"),
        [_PANEL_INCHES] * -(-len(panels) // _PANELS_A_ROW),
        columns=min(_PANELS_A_ROW, len(panels)),
        notes=[
            *_agreement(rows),
            *_exact(claims),
            *(note for panel in panels for note in panel.notes()),
        ],
        claims=[claim for claim in claims if claim.relative_error and not _met(claim)],
    )
    for index, panel in enumerate(panels):
        panel.draw(page.panel(index // _PANELS_A_ROW, index % _PANELS_A_ROW))
    handles: list[Artist] = [Patch(color=of.color, label=strategy_name(name)) for name, of in look.items()]
    seen = [phase for phase in _phases_of(rows) if any(phase in panel.seen_phases() for panel in panels)]
    handles += [_phase_patch(phase) for phase in seen]
    handles += [_formula_line([], [])] * any(sent_bytes(row, "formula") is not None for row in rows)
    return page.finish(handles, lost)


@dataclass(frozen=True)
class _Panel:
    """Bars of the rows of one model and setting, by number of GPUs and strategy."""

    model: str
    setting: str
    rows: Sequence[Row]
    look: dict[str, Look]
    unit: str

    def draw(self, ax: Axes) -> None:
        """Draw the bars, over each a line at its closed form's bytes, and the marks of rows without bytes."""
        places = [self._in_place(some) for _, some in sorted(grouped(self.rows, gpus).items())]
        value_axis(ax, self._highest(), marks=any(row["status"] != "ok" for row in self.rows))
        width = bar_width(max(map(len, places)))
        for place, some in enumerate(places):
            for at, row in zip(beside(place, len(some), width), some, strict=True):
                if row["status"] == "ok":
                    self._draw_bar(ax, at, width, row)
                else:
                    gid = f"{row['status']} {_name(row)}"
                    mark_missing(ax, at, row["status"], self.look[strategy(row)].color, gid)
        name_places(ax, [str(gpus(some[0])) for some in places])
        ax.grid(axis="x", visible=False)
        ax.set_xlabel("Number of GPUs")
        ax.set_ylabel(f"Sent per GPU and step ({self.unit})")
        given = {"batch": shared(self.rows, "batch"), "L": shared(self.rows, "seq_len")}
        texts = [f"{name} {value}" for name, value in given.items() if value and self.setting != name]
        ax.set_title(", ".join(filter(None, [self.model, self.setting, *texts])))

    def notes(self) -> Iterator[str]:
        """A sentence for each row that sends other bytes than its closed form, or has none, and why."""
        named = [(", ".join(filter(None, [self.model, self.setting, _where(row)])), row) for row in self.rows]
        for name, row in named:
            if found := deviations(row):
                texts = [f"{off:+.2%} {phase}".replace("_", " ").strip() for phase, off in found.items()]
                yield f"{name}: {', '.join(texts)}"
        yield from lost_notes(named)

    def seen_phases(self) -> set[str]:
        """The phases that are large enough to be seen."""
        least = _SEEN * self._highest()
        return {
            phase
            for row in self.rows
            for phase in _phases_of([row])
            if (sent_bytes(row, "communication", phase) or 0) / _UNITS[self.unit] > least
        }

    def _highest(self) -> float:
        known = [sent_bytes(row, source) or 0 for row in self.rows for source in ("communication", "formula")]
        return max(known) / _UNITS[self.unit]

    def _in_place(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of one number of GPUs that have a bar, strategies in the order of the legend: one of the
        engines whose bytes are the same, the virtual one if it is among them."""
        virtual_first = sorted(rows, key=lambda row: engine(row) != "virtual")
        unlike = {(strategy(row), *_bytes_by_phase(row)): row for row in reversed(virtual_first)}
        order = list(self.look)
        return sorted(unlike.values(), key=lambda row: (order.index(strategy(row)), engine(row) != "virtual"))

    def _draw_bar(self, ax: Axes, at: float, width: float, row: Row) -> None:
        unit, color, bottom = _UNITS[self.unit], self.look[strategy(row)].color, 0.0
        for phase in _phases_of([row]):
            height = (sent_bytes(row, "communication", phase) or 0.0) / unit
            (bar,) = ax.bar(
                at,
                height,
                width,
                bottom=bottom,
                color=tint(color, _PHASES.get(phase, _OTHER_STRENGTH)),
                edgecolor=color,
                linewidth=0.5,
                hatch="" if phase in _PHASES else _OTHER_HATCH,
                zorder=2,
            )
            bar.set_gid(f"{phase} {_name(row)}")
            bottom += height
        formula = sent_bytes(row, "formula")
        if formula is not None:
            line = _formula_line([at - 0.5 * width, at + 0.5 * width], [formula / unit] * 2)
            line.set_gid(f"formula {_name(row)}")
            ax.add_line(line)
        if off := deviations(row).get(""):
            ax.annotate(
                f"{off:+.2%}",
                (at, max(bottom, (formula or 0) / unit)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
            )


def _name(row: Row) -> str:
    return f"{strategy_name(strategy(row))} {gpus(row)} {engine(row)}"


def _where(row: Row) -> str:
    return f"{strategy_name(strategy(row))} at {gpus(row)} GPUs, {engine(row)}"


def _unit(rows: Sequence[Row]) -> str:
    """The largest unit of which the row with the most bytes has at least one."""
    highest = max(sent_bytes(row, "communication") or 0.0 for row in rows)
    return next((name for name, nbytes in _UNITS.items() if highest >= nbytes), "bytes")


def _phases_of(rows: Sequence[Row]) -> list[str]:
    """The phases in which something is sent, by the meters or the closed form, in their order in a step."""
    entries = [
        entry
        for row in rows
        for source in ("communication", "formula")
        for entry in row["measurement"].get(source) or []
    ]
    present = {entry["phase"] for entry in entries if entry["sent_bytes"]}
    return [phase for phase in _PHASES if phase in present] + sorted(present - set(_PHASES))


def _bytes_by_phase(row: Row) -> list[tuple[str, float | None]]:
    return [(phase, sent_bytes(row, "communication", phase)) for phase in _phases_of([row])]


def _phase_patch(phase: str) -> Patch:
    return Patch(
        facecolor=tint(GREY, _PHASES.get(phase, _OTHER_STRENGTH)),
        edgecolor=GREY,
        linewidth=0.5,
        hatch="" if phase in _PHASES else _OTHER_HATCH,
        label=phase.replace("_", " "),
    )


def _formula_line(x: Sequence[float], y: Sequence[float]) -> Line2D:
    return Line2D(x, y, color=INK, linewidth=1.2, zorder=3, label="closed form")


def _agreement(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each engine on how many of its cells send the closed form's bytes in all phases."""
    for name, some in grouped(rows, engine).items():
        sums = [(sent_bytes(row, "communication"), sent_bytes(row, "formula")) for row in some]
        known = [row for row, both in zip(some, sums, strict=True) if None not in both]
        exact = sum(not deviations(row) for row in known)
        yield f"engine {name}: {exact} of {len(known)} cells send exactly the bytes of their closed form"


def _exact(claims: Sequence[DrawnClaim]) -> Iterator[str]:
    """How many claims are exactly met, and how many have no number of ours."""
    if claims:
        met = sum(map(_met, claims))
        yield f"{met} of {len(claims)} numbers of formulas exactly met"
    if unknown := sum(claim.relative_error is None for claim in claims):
        yield f"{unknown} of {len(claims)} numbers of formulas not measured"


def _met(claim: DrawnClaim) -> bool:
    return claim.relative_error is not None and abs(claim.relative_error) < _ROUNDING


draw = Drawing(__name__, _figure)
