"""Made-up measurements of machines."""

from spbench.bench.tools.calibrate.collective_rates import SEND, bus_factor
from spbench.bench.tools.calibrate.compute_rates import RatePoint
from spbench.bench.tools.calibrate.measured_cluster import Machine

#: of the large message, which takes a second longer than the small one
LARGE_BYTES = 4096

#: for monkeypatch: lets files have the figures of such machines, which are as slow as is easy to reckon with
ANY_FIGURE = ("spbench.bench.measure.clusters.cluster.implausible", lambda cluster: ())


def message(operation: str, ranks: int, small_s: float, large_s: float) -> list[RatePoint]:
    """A small and a large message."""
    factor = bus_factor(operation, ranks)
    return [
        RatePoint(operation, f"{n} B", n, "fp32", ranks, [seconds], nbytes=n, bus_factor=factor)
        for n, seconds in ((64, small_s), (LARGE_BYTES, large_s))
    ]


def machine(
    ranks: int = 2,
    per_node: int | None = None,
    device_type: str = "cpu",
    messages: tuple[str, ...] = (SEND,),
    step_s: float = 6.0,
) -> Machine:
    """Products at 100 and 400 FLOP/s, attention at 50, sums at 12 and 24 B/s, each message 1 ms and then a
    second more than the one before."""
    points = [
        RatePoint("matmul", "[5, 5] x [5, 5]", 5, "fp32", ranks, [0.5, 2.5, 9.0], flops=250),
        RatePoint("matmul", "[10, 10] x [10, 10]", 10, "fp32", ranks, [5.0], flops=2000),
        RatePoint("attention forward", "[1, 1, 5, 1]", 5, "fp32", ranks, [2.0], flops=100),
        RatePoint("sum", "16 B", 16, "fp32", ranks, [2.0], nbytes=48),
        RatePoint("sum", "4 B", 4, "fp32", ranks, [1.0], nbytes=12),
        RatePoint("training step", "bert-tiny", 8, "fp32", ranks, [step_s]),
    ]
    for place, operation in enumerate(messages if ranks > 1 else ()):
        points += message(operation, ranks, 0.001 + place, 1.001 + 2 * place)
    memory = (80 * 2**30, 2**29) if device_type == "cuda" else None
    return Machine(points, device_type, "a device", memory, ranks, per_node or ranks, kernels=100)
