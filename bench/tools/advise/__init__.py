"""Which layout of a model on a cluster is the fastest that fits: layouts are enumerated, estimated from a few
small traces, the promising ones traced with few layers, and the best of these whole."""
