"""Data parallelism without buckets: one all-reduce for each parameter, after backward."""

import torch

import spbench


class UnbucketedDataParallel(spbench.Backend):
    """Gradients in tensors of their own, each summed by a collective of its own."""

    name = "unbucketed"
    pipelined = False

    def prepare(self):
        self.sums = list(self.summed())
        for parameter in self.names:
            parameter.grad = torch.zeros_like(parameter)
        return self.make_optimizer(list(self.names))

    def zero(self):
        for gradient in self.held_gradients():
            gradient.zero_()

    def synchronize(self):
        for group, parameters in self.sums:
            for parameter in parameters:
                spbench.collectives.all_reduce(parameter.grad, group)

    def held_gradients(self):
        return [parameter.grad for parameter in self.names]

    @classmethod
    def traffic(cls, step):
        # a ring sends the same bytes for many small tensors as for one of all
        for summed in step.summed:
            payload = summed.elements * step.element_bytes
            yield spbench.Traffic("gradient_sync", "gradients", "all_reduce", 1, payload, summed.group_axes)
