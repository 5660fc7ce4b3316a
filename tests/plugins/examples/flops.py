"""A meter of the floating-point operations of a step, by operator."""

from collections import Counter

from torch.utils.flop_counter import flop_registry

import spbench


class FlopMeter(spbench.Meter):
    """Matmuls as torch's flop counter counts them: 2 for a multiplication and an addition."""

    name = "flops"

    def __init__(self, mesh):
        super().__init__(mesh)
        self.counts: Counter[str] = Counter()
        self.begun = False

    def phase(self, name):
        self.begun = True

    def see(self, call):
        operator = getattr(call.func, "_overloadpacket", None)
        if self.begun and operator in flop_registry:
            flops = flop_registry[operator](*call.args, **call.kwargs, out_val=call.result)
            self.counts[str(operator)] += flops

    def found(self):
        return {"flops": self.counts.total(), "flops_by_operator": dict(self.counts)}
