"""Figures of result rows.

The figure NAME of a scenario is ``draw(rows, comparison, output) -> list of paths`` in the module NAME of
this package, ``draw_NAME = ...`` in any module of it, or an entry point NAME of the group
``spbench.figures``.
"""

from spbench.impls.discovery import FunctionModules


class NothingToDraw(ValueError):
    """None of the rows is of what a figure shows; the message says what that is."""


FIGURES = FunctionModules(__name__, "*", "draw", "figures", "spbench.figures")
