"""Strategies: ways to divide one sample among ranks, a file each (`spbench list strategies`), with helpers.

To learn how strategies work, read ring_self_attention.py, which has its whole algorithm; then ulysses.py and
ring_attention.py. ``base.py`` says what a model asks a strategy for: its defaults are a single device, so a
strategy's file holds only its changes. In each class ``meets`` names the operations in which positions meet;
a ``Site`` is such an operation in a model, with its sizes; ``communication`` yields the bytes that meters
must see. docs/learn explains seven strategies with pictures, and ends with the lines of each file.
"""
