"""Baselines as the authors of a paper ran them, where what their code computes is not what the model asks
for.

A paper's speed-up is a ratio, and its denominator is code that its authors chose. Where that code is public
and computes something else than the method whose name it bears, it stands here, so that its time, memory and
bytes can be set beside the method's own. None is a method to use: no list of strategies has them, and
`spbench verify` says where each departs from the model. :func:`spbench.impls.registries.all_as_published`
finds them.
"""
