"""Baselines as the authors of a paper ran them, where their code computes another function than the model's.

A paper's speed-up is a ratio, and its denominator is code that its authors chose. If that code is public and
computes something else than the method whose name it bears, this room has it, so that its time, memory and
bytes can be compared with the method's own. No baseline is a method to use: no list of strategies has one,
and `spbench verify` says where each departs from the model. :func:`spbench.impls.registries.all_as_published`
returns the baselines by name.
"""
