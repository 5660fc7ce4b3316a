"""The panel 'published and ours': every claim of a comparison table, with its relative error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from pandas import DataFrame, isna

from spbench.plots.style import GREY, INK, TIMES, number, shortened

_COLUMNS_POINTS = {"published": 46, "ours": 92, "error": 134}


@dataclass(frozen=True)
class Claim:
    """A row of a comparison table; None where it has no number.

    Attributes:
        numerator, denominator: keys of result rows; no denominator: the claim is a value, not a ratio.
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
    def is_ratio(self) -> bool:
        return bool(self.denominator)

    def text(self, value: float | None) -> str:
        """A value of this claim for people."""
        return "none" if value is None else number(value) + (TIMES if self.is_ratio else "")


def claims_of(comparison: DataFrame) -> list[Claim]:
    """The claims of a comparison table, in its order; the table may be empty, and read from a CSV file."""
    return [_claim(record) for record in comparison.to_dict("records")]


def _claim(record: Mapping[object, object]) -> Claim:
    def text(name: str) -> str:
        value = record.get(name)
        return value if isinstance(value, str) else ""

    def value(name: str) -> float | None:
        found = record.get(name)
        return None if found is None or isna(found) else float(found)  # type: ignore[call-overload, arg-type]

    published = value("published")
    return Claim(
        name=text("claim"),
        published=math.nan if published is None else published,
        ours=value("reproduced"),
        relative_error=value("relative_error"),
        role=text("role"),
        note=text("note"),
        variant=text("variant"),
        numerator=text("numerator"),
        denominator=text("denominator"),
    )


def height_inches(claims: list[Claim]) -> float:
    """The height the panel needs."""
    return 0.75 + 0.24 * len(claims)


def draw_claims(ax: Axes, claims: list[Claim]) -> None:
    """Each claim on a line: ours relative to published at zero, and the numbers beside it."""
    several = len({claim.variant for claim in claims}) > 1
    for y, claim in enumerate(claims):
        color = INK if claim.ours is not None else GREY
        cells = {
            "published": claim.text(claim.published),
            "ours": claim.text(claim.ours),
            "error": "" if claim.relative_error is None else f"{100 * claim.relative_error:+.1f}%",
        }
        for column, text in cells.items():
            weight = "bold" if column == "error" else "normal"
            _beside(ax, y, _COLUMNS_POINTS[column], text, color, weight)
        if claim.relative_error is None:
            note = shortened(claim.note or "not run", 70)
            ax.text(0.02, y, note, transform=ax.get_yaxis_transform(), color=GREY, fontsize=6.5, va="center")
            continue
        ax.plot([0, claim.relative_error], [y, y], color=INK, linewidth=1.2, zorder=2)
        ax.plot(
            [claim.relative_error],
            [y],
            marker="o",
            color=INK,
            markerfacecolor="white" if claim.role == "calibrated" else INK,
            zorder=3,
            gid=f"claim {claim.name} {claim.variant}".strip(),
        )
    for column, points in _COLUMNS_POINTS.items():
        _beside(ax, -0.85, points, column, GREY, "normal")
    ax.axvline(0, color=INK, linewidth=1)
    errors = [abs(claim.relative_error) for claim in claims if claim.relative_error is not None]
    reach = 1.2 * max([0.1, *errors])
    ax.set_xlim(-reach, reach)
    ax.set_ylim(len(claims) - 0.5, -0.5)
    ax.set_yticks(
        range(len(claims)),
        [f"{c.name} ({c.variant})" if several and c.variant else c.name for c in claims],
    )
    ax.grid(axis="y", visible=False)
    ax.xaxis.set_major_locator(MaxNLocator(7))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{100 * error:+.0f}%" if error else "0"))
    ax.set_xlabel("Relative error: ours / published - 1")
    ax.set_title("Published and ours", loc="left")


def claim_handles(claims: list[Claim]) -> list[Artist]:
    """A legend entry, where some of the claims are not predictions."""
    if not any(claim.role == "calibrated" for claim in claims):
        return []
    hollow = Line2D([], [], marker="o", color=INK, markerfacecolor="white", linestyle="none")
    hollow.set_label("calibrated on this value")
    return [hollow]


def _beside(ax: Axes, y: float, points: float, text: str, color: str, weight: str) -> None:
    ax.annotate(
        text,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(points, 0),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="center",
        fontsize=7.5,
        color=color,
        fontweight=weight,
        annotation_clip=False,
    )
