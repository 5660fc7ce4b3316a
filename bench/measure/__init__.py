"""Measuring: everything from a cell to its row. ``tools`` and ``command_line`` import only from this package,
whose names are in ``__init__.pyi``, each with its module (:func:`lazy_names`)."""

from spbench.impls import lazy_names

__getattr__ = lazy_names(__name__, __file__)
