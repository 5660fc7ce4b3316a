"""Kernels that frameworks fuse, as operators with a fake implementation.

An observer of operators sees one call, its inputs and its outputs, and none of the intermediate
tensors of the plain-torch code that runs it where no fused kernel is at hand. That is what a fused
kernel means for memory, on fake tensors and on real ones alike.
"""
