"""The panel 'published and ours': every claim of a comparison table, with its relative error."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from pandas import DataFrame, isna

from spbench.plots.axes import figure_of, marker_line, set_error_ticks, set_ticks, write_beside
from spbench.plots.grid import Drawn, Panel
from spbench.plots.paper import PAGE_INCHES
from spbench.plots.style import GREY, INK, TIMES, model_name, number, short_name, shortened

_CHARACTER_POINTS, _GAP_POINTS = 4.5, 8

#: for the role of a claim: (colour inside its marker, entry in the legend)
_ROLES = {
    "predicted": (INK, "predicted"),
    "calibrated": ("white", "calibrated on this value"),
    "inferred": ("0.7", "a setting was inferred from this value"),
}


@dataclass(frozen=True)
class DrawnClaim:
    """A row of a comparison table; ``ours`` and ``relative_error`` are None if there is no number.

    Attributes:
        numerator, denominator: keys of result rows; without a denominator the claim is a value, not a ratio.
    """

    name: str
    published: float
    ours: float | None
    relative_error: float | None
    role: str
    note: str
    variant: str
    numerator: str
    denominator: str

    @property
    def title(self) -> str:
        """The claim's rows by model, strategy and GPUs: "BERT base: RSA on 64 GPUs / TP on 12"."""
        named = [_key_words(key) for key in (self.numerator, self.denominator) if key]
        if not named or None in named:
            return self.name
        (model, first), *others = cast("list[tuple[str, str]]", named)
        return " / ".join([f"{model}: {first} GPUs", *(text for _, text in others)])

    @property
    def is_ratio(self) -> bool:
        return bool(self.denominator)

    def text(self, value: float | None) -> str:
        """A value of this claim as text; a ratio has a multiplication sign."""
        return "none" if value is None else number(value) + (TIMES if self.is_ratio else "")


def _key_words(key: str) -> tuple[str, str] | None:
    """The model, and the strategy with its number of ranks, in a cell's key; None if the key has no mesh."""
    model, strategy, mesh, *_ = [*key.split("/"), "", ""]
    sizes = [int(size) for size in re.findall(r"\d+", mesh.partition("·")[0])]
    if not sizes:
        return None
    return model_name(model), f"{short_name(strategy)} on {math.prod(sizes)}"


def claims_of(comparison: DataFrame) -> list[DrawnClaim]:
    """The claims of a comparison table, in the table's order; the table may be empty."""
    return [_claim(record) for record in comparison.to_dict("records")]


def _claim(record: Mapping[Any, Any]) -> DrawnClaim:
    values = (record.get(name) for name in ("published", "reproduced", "relative_error"))
    published, ours, error = (None if isna(value) else float(value) for value in values)
    texts = (record.get(name) for name in ("claim", "role", "note", "variant", "numerator", "denominator"))
    name, *others = (text if isinstance(text, str) else "" for text in texts)
    return DrawnClaim(name, math.nan if published is None else published, ours, error, *others)


def claims_panel(claims: Sequence[DrawnClaim]) -> list[list[Panel]]:
    """A facet with one panel, which has a line for each claim: our relative error as a marker, and both
    numbers as text. No facet if there are no claims."""
    panel = Panel(
        partial(_draw_claims, claims=claims), x_label="Ours / published - 1", inches=0.5 + 0.2 * len(claims)
    )
    return [[panel]] if claims else []


def _draw_claims(ax: Axes, claims: Sequence[DrawnClaim]) -> Drawn:
    several = len({claim.variant for claim in claims}) > 1
    narrow = figure_of(ax).get_figwidth() < PAGE_INCHES
    columns = _columns(claims)
    for y, claim in enumerate(claims):
        color = INK if claim.ours is not None else GREY
        for column, text in _cells(claim).items():
            _beside(ax, y, columns[column], text, color, "bold" if column == "error" else "normal")
        if claim.relative_error is None:
            note = shortened(claim.note or "not run", 22 if narrow else 60, 1 + narrow)
            ax.text(0.02, y, note, transform=ax.get_yaxis_transform(), color=GREY, fontsize=7, va="center")
            continue
        ax.plot([0, claim.relative_error], [y, y], color=INK, linewidth=1.2, zorder=2)
        gid, face = f"claim {claim.name} {claim.variant}".strip(), _ROLES.get(claim.role, (INK, ""))[0]
        ax.plot([claim.relative_error], [y], "o", color=INK, markerfacecolor=face, zorder=3, gid=gid)
    for column, points in columns.items():
        _beside(ax, -0.85, points, column, GREY, "normal")
    ax.axvline(0, color=INK, linewidth=1)
    errors = [abs(claim.relative_error) for claim in claims if claim.relative_error is not None]
    reach = 1.2 * max([0.1, *errors])
    ax.set_xlim(-reach, reach)
    ax.set_ylim(len(claims) - 0.5, -0.5)
    names = [f"{c.title} ({c.variant})" if several and c.variant else c.title for c in claims]
    set_ticks(ax.yaxis, range(len(claims)), [_wrapped(name) if narrow else name for name in names])
    ax.grid(axis="y", visible=False)
    set_error_ticks(ax.xaxis, 2 if narrow else 7, reach)
    if not narrow:
        ax.set_title("Published and ours", loc="left")
    return Drawn(published=legend_entries(claims))


def _wrapped(name: str) -> str:
    """A name, whose words are joined by hyphens, broken into two lines for a narrow figure."""
    return "\n".join(textwrap.wrap(name, max(14, 1 + 3 * len(name) // 5)))


def legend_entries(claims: Sequence[DrawnClaim]) -> list[Artist]:
    """The legend entries of the claims' roles; none if no claim is calibrated or inferred."""
    roles = {claim.role for claim in claims if claim.relative_error is not None}
    if roles.isdisjoint({"calibrated", "inferred"}):
        return []
    return [marker_line(name, INK, face=face) for role, (face, name) in _ROLES.items() if role in roles]


def _cells(claim: DrawnClaim) -> dict[str, str]:
    """The texts on a claim's line by column: published value, our value and error."""
    error = ""
    if claim.relative_error is not None:
        # a small error must not be written as 0.0%
        small = 0 < abs(claim.relative_error) < 5e-4
        error = f"{100 * claim.relative_error:{'+.0e' if small else '+.1f'}}%"
    return {"published": claim.text(claim.published), "ours": claim.text(claim.ours), "error": error}


def _columns(claims: Sequence[DrawnClaim]) -> dict[str, float]:
    """Each column's distance from the axes to its right edge, in points, by its longest text."""
    edges, at = {}, 0.0
    for column in _cells(claims[0]):
        longest = max(len(column), *(len(_cells(claim)[column]) for claim in claims))
        at += _CHARACTER_POINTS * longest + _GAP_POINTS
        edges[column] = at
    return edges


def _beside(ax: Axes, y: float, points: float, text: str, color: str, weight: str) -> None:
    style = {"ha": "right", "va": "center", "color": color, "fontweight": weight, "annotation_clip": False}
    write_beside(ax, text, (1, y), (points, 0), xycoords=("axes fraction", "data"), **style)
