"""Strategies, models and backends, which know nothing of ``bench``. This is their door, through which
``bench`` goes: its names stand in ``__init__.pyi``, each with its module (:mod:`spbench.impls.door`)."""

from spbench.impls.door import lazy_names

__getattr__ = lazy_names(__name__, __file__)
