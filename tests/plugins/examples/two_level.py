"""Data parallelism whose gradients are summed within pairs of ranks, and then over the pairs."""

import torch

import spbench

PAIR = 2


class TwoLevelDataParallel(spbench.Backend):
    """Gradients in tensors of their own, each summed over a part of the replicas and then over the parts."""

    name = "two_level"
    pipelined = False

    def prepare(self):
        self.sums = []
        for axes, parameters in self.by_axes():
            ranks = self.around.place.size("dp", *axes)
            pair = PAIR if ranks % PAIR == 0 else 1
            within = self.around.place.subgroup("dp", *axes, size=pair)
            across = self.around.place.subgroup("dp", *axes, size=pair, across=True)
            self.sums.append((within, across, parameters))
        for parameter in self.names:
            parameter.grad = torch.zeros_like(parameter)
        return self.make_optimizer(list(self.names))

    def zero(self):
        for gradient in self.held_gradients():
            gradient.zero_()

    def synchronize(self):
        for within, across, parameters in self.sums:
            for parameter in parameters:
                spbench.collectives.all_reduce(parameter.grad, within)
                spbench.collectives.all_reduce(parameter.grad, across)

    def held_gradients(self):
        return [parameter.grad for parameter in self.names]

    @classmethod
    def traffic(cls, step):
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            pair = PAIR if summed.size % PAIR == 0 else 1
            for run in (pair, summed.size // pair):
                yield spbench.Traffic(
                    "gradient_sync", "gradients", "all_reduce", 1, payload, summed.group_axes, run
                )
