"""Data parallelism and the optimizer as in Megatron-Core's DistributedDataParallel and (distributed)
optimizer (core/distributed and core/optimizer of NVIDIA/Megatron-LM, commit d98e8a64).
docs/reference/arguments.md names the flag of each option.

In half precision, weights take 2 bytes a parameter and contiguous float32 main gradients 4 (see
:class:`MainGradients`), which are never freed. Every rank also has float32 main weights of 4 bytes and Adam's
moments of 8, a tensor each for every parameter: 18 bytes a parameter in all. With the distributed optimizer
(Rajbhandari et al., arXiv 1910.02054, section 5) a rank has main weights and moments of its part only (6 +
12/N bytes), and the weights are views of one contiguous buffer. Adam's gradients are views of the main
gradients. In float32 and float64 everything is in that precision, and weights are updated in place.

The loss of each micro-batch, and before the sums the norm of each bucket, is checked for NaN; before the
update, gradients are clipped by the norm of all gradients. As in Megatron-Core, the host waits for its device
where it reads such a number, and after each exchange between stages (batch_p2p_sync of its
ModelParallelConfig, true by default).

Differences from Megatron-Core:

- With several instances of the optimizer, sums over instances begin after the last backward; in Megatron-Core
  they follow each bucket's reduce-scatter on a stream of its own.
- The check for NaN takes its pass and its wait, but reports no NaN.
- The norm is summed over the ranks of a stage, then over stages; in Megatron-Core over all ranks at once, and
  without the distributed optimizer only over ranks that hold other weights.
- A parameter whose gradient is summed over further axes (norms under sequence parallelism, over tp) is in a
  buffer of its own for that group; in Megatron-Core one buffer is summed over dp, then over tp.
- Buckets are sent early from the first step on; in Megatron-Core a first step learns which gradients exist.
- Main weights exist before the first step, as in Megatron-Core. Yet one of its own tests (a GPT on 8 replicas
  with the distributed optimizer) peaks in its first step as if they did not exist yet.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends import main_gradients
from spbench.impls.backends.backend import Backend, HeldPart
from spbench.impls.backends.host_optimizer import HostOptimizer, PartOnHost, first_of
from spbench.impls.backends.main_weights import MainWeight, main_weight, write_back
from spbench.impls.backends.megatron_options import (
    ClippedGradients,
    MegatronOptions,
    held_shares,
    norm_traffic,
)
from spbench.impls.backends.muon import QUINTIC, Matrix, Muon, is_matrix
from spbench.impls.backends.optimizer import NarrowMoments, Optimizer, Precision
from spbench.impls.backends.optimizer_options import EACH_WEIGHT, HostLayout
from spbench.impls.backends.planned_buffers import (
    PlannedBuffer,
    cuts_of_buffers,
    dealt_weights,
    magnitudes_traffic,
    muon_traffic,
    planned_buffers,
    sharded_lengths,
    updated_elements,
)
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.composition import by_partial_axes, chunks_of, summed_axes, trained_parameters
from spbench.impls.kernels.projection import PutOff
from spbench.impls.layout import Unsupported, is_expert, shard_of, stacks_experts
from spbench.impls.place import Place
from spbench.impls.rings import wait_for_device
from spbench.impls.traffic import Traffic


class Megatron(Backend):
    """bf16 weights with float32 main gradients, and all or a part of the optimizer on every rank."""

    name = "megatron"
    frees_sent_outputs = True
    keeps_stage_inputs = True  # set_input_tensor of its core/transformer/transformer_block.py
    host_waits_for_transfers = True
    zeroes_in_step = True
    options_type = MegatronOptions
    options: MegatronOptions
    muon_coefficients = QUINTIC

    def prepare(self) -> Optimizer:
        # make all groups first, in an order that is the same on all ranks
        groups = {axes: self._groups(axes) for axes in by_partial_axes(self.names, self.strategy)}
        planned = [*planned_buffers(self.module, self.strategy, self.around, self.options)]
        self.buffers = [self._buffer(groups[each.axes], each) for each in planned]
        #: with Muon that deals weights out to ranks: the weights of each group and the rank that updates each
        self.dealt = dealt_weights(planned, groups) if self.options.deals else []
        tied = self.around.tied(self.module)
        # where one stage has both uses of a tied embedding, autograd adds up their gradients
        twice = getattr(self.module, "tied", None) if tied is None else None
        self.gradients = main_gradients.MainGradients(
            self.buffers,
            overlapped=self.options.overlap_grad_reduce,
            fused=self.options.gradient_accumulation_fusion,
            added_anyway={p for p in self.names if p is twice},
            checked=self.host_reads_losses,
        )
        self.put_off = self._put_off()
        overlapped = self.options.overlap_param_gather
        self.gathered = main_gradients.GatheredInForward(
            chunks_of(self.module) if overlapped else [], self.buffers
        )
        mains = [
            self._main_weight(bucket, p)
            for buffer in self.buffers
            for bucket in buffer.buckets
            for p in bucket.parameters
        ]
        if self.dealt:
            others = {p for each in self.dealt for p in each.of_others()}
            mains = [main for main in mains if main.parameter not in others]
        # of a small model a rank may hold only padding, but torch's optimizers need a tensor
        self.mains = [main for main in mains if main.values.numel()] or mains[:1]
        if self.options.update == "muon":
            self.mains.sort(key=self._by_muon, reverse=True)  # the order of Muon.gradients
        self.clipping = None
        if largest := self.options.clip_grad:
            shares = [self._shares(main) for main in self.mains]
            self.clipping = ClippedGradients(self.around.place, largest, shares)
        shard_groups = [bucket.group for buffer in self.buffers for bucket in buffer.buckets[:1]]
        if self.options.update == "muon":
            return self._clipped(self._muon(shard_groups))
        if self.options.optimizer_offload_fraction < 1:
            values, settings = [main.values for main in self.mains], self.optimizer_settings(shard_groups)
            return PartOnHost(values, self._on_host(), self.precision, self.host_layout, **settings)
        values, groups_of_shards = [main.values for main in self.mains], shard_groups
        if not self.options.distributed_optimizer:
            groups_of_shards = []
        if self.options.exp_avg_dtype == "bf16" and self.precision.parameters == torch.bfloat16:
            settings = self.optimizer_settings(groups_of_shards)
            precision = replace(self.precision, master=False)
            return self._clipped(NarrowMoments(values, precision, torch.bfloat16, **settings))
        return self._clipped(self.make_optimizer(values, masters=False, shard_groups=groups_of_shards))

    @property
    def host_reads_losses(self) -> bool:
        return self.options.check_for_nan_in_loss_and_grad and not self.precision.loss_scale

    def kind_of_backward(self, number: int) -> int:
        return 0 if self.put_off is None else self.put_off.kind(number)

    def _put_off(self) -> PutOff | None:
        """The matmuls for the gradient of this rank's head that are put off, if the options ask for that."""
        weights = [getattr(module, "head_weight", None) for module in chunks_of(self.module)]
        heads = [weight for weight in weights if weight is not None and weight in self.gradients.views]
        deferred = self.options.defer_embedding_wgrad_compute and heads
        return PutOff(heads[0], self.options.wgrad_deferral_limit) if deferred else None

    def _clipped(self, optimizer: Optimizer) -> Optimizer:
        if self.clipping is not None and not isinstance(optimizer, HostOptimizer):
            optimizer.before_update = self.clipping.clip
        return optimizer

    def _muon(self, shard_groups: Sequence[dist.ProcessGroup | None]) -> Muon:
        matrices, others = [], [main.values for main in self.mains if not self._by_muon(main)]
        for main in filter(self._by_muon, self.mains):
            assert main.values.numel() == main.parameter.numel(), "a matrix is cut over ranks"
            shard = shard_of(main.parameter) if self.options.muon_tp_mode == "duplicated" else None
            cut = (self.strategy.place.group(shard.axis), shard.dim) if shard else (None, 0)
            matrices.append(Matrix(main.values, main.parameter.shape, *cut, stacks_experts(main.parameter)))
        return Muon(
            matrices,
            others,
            self.precision,
            steps=self.options.muon_steps,
            coefficients=self.muon_coefficients,
            **self.optimizer_settings(shard_groups),
        )

    def _by_muon(self, main: MainWeight) -> bool:
        return bool(main.values.numel()) and is_matrix(self.names[main.parameter], main.parameter)

    def _shares(self, main: MainWeight) -> list[tuple[int, float]]:
        p, place = main.parameter, self.around.place
        if p is self.around.tied(self.module) and not self.around.stage.first:
            return [(main.values.numel(), 0.0)]  # the first stage counts the tied embedding
        ranks = place.size(*summed_axes(self.strategy.partial_axes(p)))
        sharing = self.options.sharing(ranks) if self.options.distributed_optimizer else 1
        return held_shares(p, main.elements, place, sharing)

    @property
    def gradient_norm(self) -> Tensor | None:
        return None if self.clipping is None else self.clipping.norm

    @property
    def host_layout(self) -> HostLayout:
        return replace(EACH_WEIGHT, overlaps=self.options.overlap_cpu_optimizer_d2h_h2d)

    def _on_host(self) -> list[bool]:
        """Whether each main weight is on the host; the share counts for experts and other weights apart."""
        chosen: dict[int, bool] = {}
        for kind in (False, True):
            mains = [main for main in self.mains if is_expert(main.parameter) == kind]
            sizes = [main.values.numel() for main in mains]
            there = first_of(sizes, self.options.optimizer_offload_fraction)
            chosen |= {id(main): each for main, each in zip(mains, there, strict=True)}
        return [chosen[id(main)] for main in self.mains]

    def _groups(self, axes: Sequence[str]) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """(the ranks that share or sum a buffer whose gradients are summed over these axes, the ranks of
        other optimizer instances that hold the same part)."""
        whole, place = self.around.gradient_group(axes), self.around.place
        if self.options.num_distributed_optimizer_instances == 1:
            return whole, None
        axes = summed_axes(axes)
        each = self.options.sharing(place.size(*axes))
        group = place.subgroup(*axes, size=each)
        return group, place.subgroup(*axes, size=each, across=True)

    def _buffer(
        self,
        groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
        planned: PlannedBuffer,
    ) -> main_gradients.GradientBuffer:
        parameters, (group, instances) = list(planned.parameters.values()), groups
        return main_gradients.GradientBuffer(
            group,
            parameters,
            self.gradient_dtype(self.precision, self.options),
            planned.layouts,
            planned.sharded,
            instances,
            scaled=is_expert(parameters[0]) and self.around.place.size("dp", "cp", "sp") > 1,
            eight_bits=planned.eight_bits,
        )

    def _main_weight(self, bucket: main_gradients.GradientBucket, p: nn.Parameter) -> MainWeight:
        alone = self.on_host and self.options.use_precision_aware_optimizer
        return main_weight(bucket, p, on_host_alone=alone)

    def zero(self) -> None:
        self.gathered.forget()
        for main in self.mains:
            main.values.grad = None
        self.gradients.zero()
        if self.clipping is not None:
            self.clipping.norm = None

    def begin_gathering(self, stage: nn.Module) -> None:
        if self.options.overlap_param_gather and self.options.align_param_gather:
            self.gathered.begin(trained_parameters(stage))

    def begin_last_backward(self, stage: nn.Module) -> None:
        self.gradients.expect_last(trained_parameters(stage))

    def synchronize(self) -> None:
        if self.put_off is not None:
            self.put_off.add_up()
            self.gradients.complete(self.put_off.weight)
        self.gradients.finish()
        self.around.add_tied(self.module, lambda weight: self.gradients.views[weight])

    def step(self) -> None:
        if isinstance(self.optimizer, HostOptimizer):
            gradients = [main.gradient for main in self.mains]
            if self.clipping is not None:
                self.clipping.clip(gradients, self.optimizer.scale if self.precision.loss_scale else None)
            wait_for_device(self.mains[0].values)
            self.optimizer.step(gradients)
        else:
            for main in self.mains:
                # no copy if the gradient is float32 already
                main.values.grad = main.gradient.to(main.values.dtype)
            wait_for_device(self.mains[0].values)
            super().step()
        write_back(self.mains, self.buffers)
        if not self.options.overlap_param_gather:
            for buffer in self.buffers:
                for bucket in buffer.buckets:
                    bucket.gather(overlapped=False)
        for each in self.dealt:
            each.spread()

    def held(self) -> dict[str, list[Tensor]]:
        copies = [main.values for main in self.mains if not main.shared]
        return {**super().held(), "optimizer_state": [*copies, *self.optimizer.tensors()]}

    def held_gradients(self) -> list[Tensor]:
        return [buffer.gradients for buffer in self.buffers]

    def gradient_parts(self) -> dict[str, HeldPart]:
        return {self.names[m.parameter]: HeldPart(m.gradient, m.elements.start) for m in self.mains}

    def weight_parts(self) -> dict[str, HeldPart]:
        mains = {self.names[m.parameter]: HeldPart(m.counts_as, m.elements.start) for m in self.mains}
        return self.frozen_parts() | mains

    @classmethod
    def gradient_dtype(cls, precision: Precision, options: Any) -> torch.dtype:
        half = precision.parameters.itemsize == 2
        in_fp32 = half and options.accumulate_allreduce_grads_in_fp32
        return torch.float32 if in_fp32 else precision.parameters

    @classmethod
    def cuts(cls, step: PlannedStep) -> Hashable:
        return cuts_of_buffers(step)

    @classmethod
    def shares_whole_weights(cls, options: Any) -> bool:
        return bool(options.packs or options.deals)

    @classmethod
    def updated_elements(cls, step: PlannedStep, places: Sequence[Place]) -> list[int]:
        return updated_elements(step, places)

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        options = step.options
        assert isinstance(options, MegatronOptions)
        if options.update == "muon" and step.precision.loss_scale:
            raise Unsupported("Muon has no loss scaling", "use bf16")
        if options.optimizer_offload_fraction < 1 and step.precision.loss_scale:
            raise Unsupported("a part of the optimizer on the host has no loss scaling", "use bf16")
        if options.clip_grad:
            yield from norm_traffic(step.around.place, step.element_bytes)
        width = cls.gradient_dtype(step.precision, options).itemsize
        phase = "backward" if options.overlap_grad_reduce else "gradient_sync"
        shards = options.distributed_optimizer and not options.deals
        lengths = sharded_lengths(step) if shards else Counter()
        eight_bits = sharded_lengths(step, eight_bits=True) if options.fp8_param_gather else Counter()
        if options.update == "muon":
            yield from muon_traffic(step, options)
        if options.fp8_param_gather:
            yield from magnitudes_traffic(step)
        for summed in step.summed:
            axes = summed.group_axes
            if not shards:
                yield Traffic(phase, "main gradients", "all_reduce", 1, summed.elements * width, axes)
                continue
            elements, each = lengths[summed.axes], options.sharing(summed.size)
            summed_bytes, gathered_bytes = elements * width, elements * step.element_bytes
            gathered_bytes -= eight_bits[summed.axes] * (step.element_bytes - 1)
            yield Traffic(phase, "main gradients", "reduce_scatter", 1, summed_bytes, axes, each)
            if each < summed.size:
                part, instances = summed_bytes // each, summed.size // each
                yield Traffic("gradient_sync", "over instances", "all_reduce", 1, part, axes, instances)
            gathered = "forward" if options.overlap_param_gather else "optimizer"
            yield Traffic(gathered, "updated weights", "all_gather", 1, gathered_bytes, axes, each)
            if step.precision.loss_scale:
                yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, axes, each)
