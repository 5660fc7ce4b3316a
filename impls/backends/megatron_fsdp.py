"""Megatron-FSDP, as Megatron-LM has it by ``--use-megatron-fsdp`` (core/distributed/fsdp/src/megatron_fsdp of
NVIDIA/Megatron-LM, commit d98e8a64): sharded weights, gradients and optimizer's state in units of a layer.

In half precision each rank holds its part of the weights, of 2 bytes an element, of float32 main weights and
Adam's moments, and of main gradients, which are never freed: 18 bytes an element, over N ranks, with main
gradients in float32. A layer's weights are gathered before its forward, freed, and gathered again for its
backward; weights in no layer (embedding, last norm, head) are gathered once a step and kept. Gradients of
each micro-batch are reduce-scattered by layer and added to the main gradients.

Numbers of elements say how many weights are gathered ahead, and how many whole gradients are kept while they
are sent: half of ``suggested_communication_unit_size``, and all of it (``suggested_AG_prefetch_size`` and
``suggested_RS_queue_capacity`` of megatron_fsdp.py). The default is at least 10^9 elements, so that a rank of
a smaller model gathers all layers ahead, and has all whole gradients when a backward ends.

The units and their hooks are torch's ``fully_shard`` (:class:`FullySharded`). Differences from Megatron-FSDP:

- Weights are copied out of the gathered buffer, where Megatron-FSDP has views of it; a layer's gradients are
  copied to the buffer that is summed when all are made, where Megatron-FSDP copies each at once.
- Parameters are cut by rows, each for itself; in Megatron-FSDP a flat buffer of the layer is cut.
- The computing stream waits for each reduce-scatter but the last.
- With ``fsdp_double_buffer`` no more than two layers are gathered or on their way at a time, but their
  memory is freed in between; in Megatron-FSDP it is not.
- Gradients are neither clipped nor checked; there are no pipeline stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.backend import HeldPart
from spbench.impls.backends.buckets import weakly
from spbench.impls.backends.fully_shard import FullySharded
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.backends.sharded_stages import sharded_traffic
from spbench.impls.backends.sharding_options import ShardingOptions
from spbench.impls.composition import chunks_of
from spbench.impls.options import Saving
from spbench.impls.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

#: the least default of suggested_communication_unit_size, in elements
_LEAST_UNIT = 10**9
_NOT_OF_MEGATRON = (
    *("optimizer", "reduce_at", "own_weights", "state_dtype", "data_parallel_replicate_degree"),
    *("forward_prefetch", "backward_prefetch", "reshard_rest"),
)


@dataclass(frozen=True)
class MegatronFSDPOptions(ShardingOptions):
    """Options of :class:`MegatronFSDP`, next to those of ``fully_shard`` that it has too; ``reduce_dtype`` is
    Megatron-FSDP's ``grad_comm_dtype``.

    Attributes:
        data_parallel_sharding_strategy: what ranks share in addition to the optimizer's state:
            "optim_grads_params": gradients and weights; "optim_grads": gradients, while the weights are
            gathered once a step and kept.
        main_grads_dtype: the dtype of main gradients: the "weights"', or "fp32".
        suggested_communication_unit_size: elements of gradients on their way, and half of it of weights
            gathered ahead. 0: twice the mean of the layers, but at least 10^9.
        fsdp_double_buffer: at most two layers are gathered, and at most two layers' gradients on their way.

    Raises:
        ValueError: an option has another word or a negative number, or one of ``fully_shard`` that
            Megatron-FSDP has not is set.
    """

    reshard_rest: bool = False
    data_parallel_sharding_strategy: Literal["optim_grads_params", "optim_grads"] = "optim_grads_params"
    main_grads_dtype: Literal["weights", "fp32"] = "weights"
    suggested_communication_unit_size: int = 0
    fsdp_double_buffer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suggested_communication_unit_size < 0:
            raise ValueError("suggested_communication_unit_size is a number of elements, 0 or more")
        plain = ShardingOptions(reshard_rest=False)
        for name in _NOT_OF_MEGATRON:
            if getattr(self, name) != (only := getattr(plain, name)):
                raise ValueError(f"megatron_fsdp has no {name} but {only}; leave it out, or use zero3")

    def savings(self) -> Iterator[Saving]:
        if self.data_parallel_sharding_strategy == "optim_grads":
            words = "weights are in shards too, and gathered by layer"
            yield Saving({"data_parallel_sharding_strategy": "optim_grads_params"}, words)
        if not self.fsdp_double_buffer:
            words = "two layers at a time are gathered, and two layers' gradients on their way"
            yield Saving({"fsdp_double_buffer": True}, words)


class GradientQueue:
    """A reduce-scatter for ``fully_shard`` (its ``ReduceScatter``) that keeps the last whole gradients.

    Args:
        capacity: the oldest are freed while there are more elements than this.
        buffers: the number of layers' gradients that are kept at most; None: any.
    """

    def __init__(self, capacity: int, buffers: int | None):
        self.capacity, self.kept = capacity, deque[Tensor](maxlen=buffers)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        while sum(map(torch.numel, self.kept)) > self.capacity:
            self.kept.popleft()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.kept.append(input_tensor)
        return dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )

    def clear(self, *_: object) -> None:
        self.kept.clear()


class MegatronFSDP(FullySharded):
    """Layers' weights are gathered far ahead; main gradients and weights in half precision are kept."""

    name = "megatron_fsdp"
    searched = False
    spans_layers = True  # because the layers gathered ahead are counted in elements
    pipelined = False
    freezes = False
    zeroes_in_step = True
    options_type = MegatronFSDPOptions
    options: MegatronFSDPOptions

    @classmethod
    def check_stages(cls, options: Any, tied: bool) -> None:
        super(FullySharded, cls).check_stages(options, tied)

    @classmethod
    def reshards(cls, rest: bool, options: ShardingOptions) -> bool:
        assert isinstance(options, MegatronFSDPOptions)
        return options.data_parallel_sharding_strategy == "optim_grads_params" and not rest

    def prepare(self) -> Optimizer:
        #: the modules whose weights are kept from their first use in a step to the next step
        self.keepers: list[FSDPModule] = []
        self.queues: list[GradientQueue] = []
        optimizer = super().prepare()
        #: (this rank's weights in half precision, which are gathered, and main weights), both padded
        self.model_weights: list[tuple[Tensor, Tensor]] = []
        if self._wide_states and self.reshards(False, self.options):
            self._hold_weights()
        dtype = torch.float32 if self.options.main_grads_dtype == "fp32" else self.precision.parameters
        dtype = torch.promote_types(dtype, self.precision.parameters)
        self.main_gradients = {n: torch.zeros_like(w, dtype=dtype) for n, w in self.weights.items()}
        self.names_of = {p: name for name, p in self.sharded.items()}
        for p in self.names_of:
            p.register_post_accumulate_grad_hook(weakly(self._reduced))
        return optimizer

    def _wrap_stage(self, stage: nn.Module, policy: MixedPrecisionPolicy) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super()._wrap_stage(stage, policy)
        units = [unit for unit in stage.modules() if isinstance(unit, FSDPModule)]
        buffers = 2 if self.options.fsdp_double_buffer else None
        queue = GradientQueue(self._unit_size([unit for unit in units if unit is not stage]), buffers)
        stage.register_forward_pre_hook(queue.clear)
        self.queues.append(queue)
        for unit in units:
            if not self.reshards(unit is stage, self.options):
                unit.set_reshard_after_backward(False, recurse=False)
                self.keepers.append(unit)
            for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
                group._reduce_scatter_comm = queue

    def _unit_size(self, units: Sequence[nn.Module]) -> int:
        mean = sum(p.numel() for unit in units for p in unit.parameters()) // max(1, len(units))
        return self.options.suggested_communication_unit_size or max(_LEAST_UNIT, 2 * mean)

    def _prefetch(self, blocks: list[FSDPModule], rest: FSDPModule) -> None:
        """Let each block, and the rest of the stage, gather the next blocks, until they have half of the
        elements of a communication unit."""
        half = self._unit_size(blocks) // 2  # type: ignore[arg-type]
        sizes = {block: sum(p.numel() for p in block.parameters()) for block in blocks}  # type: ignore[attr-defined]

        def ahead(later: Sequence[FSDPModule]) -> list[FSDPModule]:
            if self.options.fsdp_double_buffer:
                return [*later[:1]]
            before = accumulate((sizes[block] for block in later), initial=0)
            return [block for block, total in zip(later, before, strict=False) if total < half]

        for place, unit in enumerate([rest, *blocks]):
            unit.set_modules_to_forward_prefetch(ahead(blocks[place:]))
        for place, unit in enumerate([*blocks, rest]):
            unit.set_modules_to_backward_prefetch(ahead(blocks[:place][::-1]))

    def _hold_weights(self) -> None:
        """Let ``fully_shard`` gather weights in half precision that are kept next to the main weights."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for stage in chunks_of(self.module):
            for unit in filter(lambda each: isinstance(each, FSDPModule), stage.modules()):
                for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
                    group._reset_sharded_params = True  # or the first forward would gather main weights
                    for p in group.fsdp_params:
                        main = p._sharded_param_data
                        p._sharded_param_data = torch.empty_like(main, dtype=self.precision.parameters)
                        self.model_weights.append((p._sharded_param_data, main))

    def _reduced(self, p: DTensor) -> None:
        """Hook: add this rank's part of a summed gradient to the main gradient."""
        assert p.grad is not None
        gradient, p.grad = p.grad.to_local(), None  # type: ignore[attr-defined]
        self.main_gradients[self.names_of[p]].add_(gradient)

    def zero(self) -> None:
        super().zero()
        torch._foreach_zero_([*self.main_gradients.values()])
        for unit in self.keepers:
            unit.reshard()
        for weights, main in self.model_weights:
            weights.copy_(main)

    def synchronize(self) -> None:
        for queue in self.queues:
            queue.clear()
        for name, weight in self.weights.items():
            weight.grad = self.main_gradients[name].to(weight.dtype)  # no copy in float32

    def held(self) -> dict[str, list[Tensor]]:
        held = super().held()
        if not self.model_weights:
            return held
        mains = [*self.weights.values()]
        weights = [weights for weights, _ in self.model_weights]
        return {**held, "parameters": weights, "optimizer_state": [*mains, *held["optimizer_state"]]}

    def held_gradients(self) -> list[Tensor]:
        return [*self.main_gradients.values()]

    def gradient_parts(self) -> dict[str, HeldPart]:
        return {name: self._part(name, gradient) for name, gradient in self.main_gradients.items()}

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        assert isinstance(step.options, MegatronFSDPOptions)
        summed_as = cls.gradient_dtype(step.precision, step.options)
        return sharded_traffic(step, summed_as, cls.reshards, keeps=True)
