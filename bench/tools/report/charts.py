"""What charts share: the colours of methods, and filters by the choices above a chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from spbench.bench.tools.report.page import LegendEntry, Selector
from spbench.plots.style import looks, strategy_name

AnyChart = alt.Chart | alt.LayerChart | alt.FacetChart
Values = Sequence[Mapping[str, Any]]


def method_scale(strategies: Iterable[str]) -> alt.Scale:
    """A scale from the names of these strategies (:func:`strategy_name`) to their colours in the figures."""
    look = looks(strategies)
    return alt.Scale(domain=[strategy_name(name) for name in look], range=[look[name].color for name in look])


def legend_of(strategies: Iterable[str], shape: str = "filled") -> list[LegendEntry]:
    """An entry for each strategy."""
    return [LegendEntry(strategy_name(name), shape, look.color) for name, look in looks(strategies).items()]


def selected(chart: AnyChart, selectors: Sequence[Selector]) -> AnyChart:
    """The chart with a parameter for each selector, showing the data of the chosen values alone."""
    for selector in selectors:
        chart = chart.add_params(alt.param(name=selector.field, value=selector.options[0][0]))
        chart = chart.transform_filter(f"datum.{selector.field} === {selector.field}")
    return chart


def spec_of(chart: AnyChart, values: Values) -> dict[str, Any]:
    """The specification of a chart without data, with these values as its data.

    Altair would copy and validate the values with each part of the chart, which takes most of the time.
    """
    # named, as layers of a chart without data would each get empty data of their own
    named = chart.properties(data=alt.NamedData(name="values"))
    return {**named.to_dict(), "data": {"values": list(values)}}
