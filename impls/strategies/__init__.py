"""Ways to divide one sample among ranks, a file each (`spbench list strategies`), and what they share.

To learn how they work, read ring_self_attention.py, where the whole algorithm stands; then ulysses.py and
ring_attention.py. ``base.py`` says what a model asks a strategy for: its defaults are a single device, so
that a file holds what its strategy changes. Everywhere, ``meets`` names where its positions meet, a ``Site``
is such a place in a model, with its sizes, and ``communication`` the bytes that meters must see. docs/learn
explains seven of them with pictures, and ends with the lines of each file.
"""
