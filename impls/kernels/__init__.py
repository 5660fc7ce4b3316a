"""Kernels that frameworks fuse, as operators with a fake implementation.

An observer of operators sees one call with its inputs and outputs. Where no fused kernel is available, plain
torch code runs inside the operator, and the observer sees none of its intermediate tensors. So on fake and
on real tensors, an operator counts as much memory as the fused kernel.
"""
