"""Fully sharded data parallelism by torch's ``fully_shard``, in units: each block, and the rest of the model
(Zhao et al., arXiv 2304.11277; Rajbhandari et al., arXiv 1910.02054).

Each rank holds 1/N of every parameter, in float32 if the precision has masters, with gradients and moments in
the same dtype. A unit's weights are all-gathered before its forward and its gradients reduce-scattered in its
backward. ZeRO-3 frees the weights in between and gathers them again; ZeRO-2 keeps the weights.

torch gathers a unit's weights on a stream of its own while the unit before it computes: in forward because
the host runs ahead, in backward in the reverse of forward's order. ``forward_prefetch`` and
``backward_prefetch`` gather further ahead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spbench.impls.backends import sharded_stages
from spbench.impls.backends.backend import Backend, BytesInBackward, HeldPart
from spbench.impls.backends.buckets import weakly
from spbench.impls.backends.host_adam import HostAdam, HostShards, move_to_host
from spbench.impls.backends.host_optimizer import HostOptimizer
from spbench.impls.backends.meta_device import cut_when_asked, materialize
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.backends.sharding_options import ShardingOptions, units_of
from spbench.impls.composition import chunks_of, summed_axes
from spbench.impls.kernels.packed_weights import scales_in
from spbench.impls.layout import Unsupported
from spbench.impls.observed_work import host_works
from spbench.impls.traffic import Traffic

if TYPE_CHECKING:  # torch's FSDP takes half a second to import, so it is imported where it is used
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
    from torch.distributed.tensor import DTensor

#: what torch's hooks cost the host in a forward and in a backward, in calls of a module: (of a unit, of each
#: of its weights), where one rank has the weights (False) and where ranks share them, by
#: scripts/program_host.py on a busy machine. A forward took 1 ms in github.com/pytorch/pytorch/issues/173680
HOOK_CALLS = {False: ((120, 6), (130, 15)), True: ((240, 12), (290, 20))}
#: the most that are counted at once, which a program can hold
_MOST_CALLS = 2**14

# no output of a model is written in place
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


class FullySharded(Backend):
    """ZeRO-3: weights are gathered for forward, freed, and gathered again for backward."""

    name = "zero3"
    shares_out = frozenset({"optimizer_state", "gradients", "parameters"})
    options_type = ShardingOptions
    options: ShardingOptions
    #: whether to free the weights between forward and backward
    reshard_after_forward: ClassVar[bool] = True

    @classmethod
    def gradient_dtype(cls, precision: Precision, options: ShardingOptions) -> torch.dtype:
        weights = precision.parameters
        return weights if options.reduce_dtype == "weights" else torch.promote_types(weights, torch.float32)

    @classmethod
    def bytes_in_backward(
        cls, precision: Precision, options: ShardingOptions, staged: bool
    ) -> BytesInBackward:
        # a gradient has its weight's dtype, and a copy in the buffer in which it is summed
        weight, summed = precision.parameters.itemsize, cls.gradient_dtype(precision, options).itemsize
        if staged:
            return BytesInBackward(weight + summed, layer=summed)
        wide = precision.master and options.state_dtype == "fp32"
        shard = 0 if options.optimizer == "host" else 4 if wide else weight
        if cls.reshard_after_forward:  # the next layer's weights are gathered before this one's are freed
            return BytesInBackward(0, shard, 3 * weight + summed)
        return BytesInBackward(weight, shard, weight + summed)

    @classmethod
    def reshards(cls, rest: bool, options: ShardingOptions) -> bool:
        """Whether weights are freed after forward: those of a block, or of the ``rest`` of the model."""
        return cls.reshard_after_forward and (options.reshard_rest or not rest)

    @classmethod
    def check_stages(cls, options: ShardingOptions, tied: bool) -> None:
        if tied and options.optimizer == "host":
            raise Unsupported(
                "a host optimizer takes gradients in backward, before stages add up a tied embedding's",
                "set optimizer: device, or untie the embedding",
            )

    @classmethod
    def starts_on_meta(cls, options: ShardingOptions) -> bool:
        return options.initialize == "meta"

    def prepare(self) -> Optimizer:
        every = {**self.names, **self.frozen}
        self.axes = {name: self.strategy.partial_axes(p) for p, name in every.items()}
        #: the mesh of ranks over which gradients are summed, by the strategy's axes of the sum
        self.meshes = {axes: self._mesh(axes) for axes in sorted({*self.axes.values()})}
        self.infos: dict[dist.ProcessGroup, FSDPMeshInfo] = {}
        self.shapes = {name: p.shape for p, name in every.items()}
        #: parameters that are in no unit
        self.apart = {p for p, name in every.items() if self._stands_apart(name)}
        names, frozen = list(self.names.values()), list(self.frozen.values())
        for whole in (every, self.names, self.frozen):  # or the whole parameters would live on
            whole.clear()
        self._wrap()
        self.apart = set()  # or the whole parameters would live on
        device = next(iter(self.meshes.values())).device_type
        if self.options.parameters == "host":
            move_to_host(self.module, device)
        materialize(self.module, device)
        parameters = dict(self.module.named_parameters())
        self.sharded: dict[str, Tensor] = {name: parameters[name] for name in names}
        # the optimizer works element by element, so on each rank's own part without the rest of a DTensor
        self.weights = {name: sharded_stages.own_part(p).detach() for name, p in self.sharded.items()}
        self.frozen_weights = {name: sharded_stages.own_part(parameters[name]).detach() for name in frozen}
        if kib := self.options.gradient_buffer_kib:
            self.gradient_buffer = torch.empty(kib * 2**10, dtype=torch.uint8, device=device)
        groups = [mesh.get_group(sharded_stages.SHARDS) for mesh in self.meshes.values()]
        weights = list(self.weights.values())
        self.host = self._host_optimizer(weights, torch.empty(0, device=device), groups)
        # the shards are the masters
        return self.host or self.make_optimizer(weights, masters=False, shard_groups=groups)

    def _mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The mesh of ranks that sum gradients along these axes; along its last dim ranks share one copy."""
        whole = self.around.gradient_mesh(axes)
        sharing = self.options.sharing(whole.size())
        return (
            whole
            if sharing == whole.size()
            else sharded_stages.in_groups(self.around.place, summed_axes(axes), whole, sharing)
        )

    def _stands_apart(self, name: str) -> bool:
        """Whether a parameter is in no unit.

        Raises:
            Unsupported: the parameter would stay in float32 for computing.
        """
        if self.options.own_weights == "units" or self.meshes[self.axes[name]].size() > 1:
            return False
        if self._wide_states:
            raise Unsupported(
                "own_weights: apart leaves weights in the dtype of the optimizer's state, which is float32",
                "set state_dtype: weights",
            )
        return True

    def _host_optimizer(
        self, weights: list[Tensor], device: Tensor, groups: list[dist.ProcessGroup]
    ) -> HostAdam | None:
        """The optimizer that updates the weights on the host, as soon as backward has made their gradients;
        None: the device updates them."""
        if not self.on_host or not weights:
            return None
        self.numbers = {p: number for number, p in enumerate(self.sharded.values())}
        #: whether the next backward is the step's last, and the numbers of weights without their gradient
        self.last, self.missing = False, {*self.numbers.values()}
        for p in self.numbers:
            p.register_post_accumulate_grad_hook(weakly(self._reduced))
        settings = self.optimizer_settings(groups)
        if self.options.parameters == "host":
            return HostShards(weights, self.precision, device, **settings)
        wide = torch.float32 if self._wide_states else weights[0].dtype
        return HostOptimizer(weights, self.precision, self.options.host_layout, wide, **settings)

    @property
    def _wide_states(self) -> bool:
        """Whether master weights have more bits than the weights."""
        return self.precision.master and self.options.state_dtype == "fp32"

    def _reduced(self, p: DTensor) -> None:
        """Hook: hand the gradient of p, reduce-scattered on the current stream, to the host optimizer."""
        assert self.host is not None
        assert p.grad is not None
        gradient, p.grad = p.grad.to_local(), None  # type: ignore[attr-defined]
        self.host.take(self.numbers[p], gradient, last=self.last)
        if self.last:
            self.missing.remove(self.numbers[p])

    def _wrap(self) -> None:
        """Shard each unit of the module, then the rest of the module."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self._wide_states and not self.options.masters_on_host:
            for p in self.module.parameters():
                if p.requires_grad or self.options.frozen_dtype == "fp32":
                    p.data = p.data.float()
        reduced = self.gradient_dtype(self.precision, self.options)
        policy = MixedPrecisionPolicy(
            param_dtype=self.precision.parameters, reduce_dtype=reduced, cast_forward_inputs=False
        )
        for stage in chunks_of(self.module):
            self._wrap_stage(stage, policy)

    def _wrap_stage(self, stage: nn.Module, policy: MixedPrecisionPolicy) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard
        from torch.distributed.tensor import DTensor

        units = units_of(stage, self.options)
        axes_of = self.strategy.partial_axes
        shapes = sharded_stages.made_matrices(
            stage, lambda p: self.meshes[axes_of(p)].size(sharded_stages.SHARDS)
        )
        for unit in [*units, stage]:
            own = [p for p in unit.parameters() if p not in self.apart and not isinstance(p, DTensor)]
            _count_hooks(unit, len(own), any(mesh.size() > 1 for mesh in self.meshes.values()))
            del own  # or the whole parameters would live on
            with cut_when_asked():
                fully_shard(
                    unit,
                    mesh=next(iter(self.meshes.values())),
                    reshard_after_forward=self.reshards(unit is stage, self.options),
                    mp_policy=policy,
                    shard_placement_fn=self._placement,
                    ignored_params=self.apart or None,
                )
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)  # a sum, as the loss is one
            unit.set_force_sum_reduction_for_comms(True)
            sharded_stages.whole_shapes(unit, shapes)
        embedding = getattr(stage, "embedding", None)
        self._prefetch([unit for unit in units if unit is not embedding], stage)  # type: ignore[misc, arg-type]

    def _prefetch(self, blocks: list[FSDPModule], rest: FSDPModule) -> None:
        """Let each block, and the rest of the stage, gather the weights of the next blocks ahead of time."""
        ahead, back = self.options.forward_prefetch, self.options.backward_prefetch
        # the rest of the stage begins forward before the first block, and backward before the last block
        if ahead:
            for place, unit in enumerate([rest, *blocks]):
                unit.set_modules_to_forward_prefetch(blocks[place : place + ahead])
        if back:
            for place, unit in enumerate([*blocks, rest]):
                unit.set_modules_to_backward_prefetch(blocks[max(0, place - back) : place][::-1])

    def _placement(self, parameter: nn.Parameter) -> Any:
        """The dim along which a parameter is cut, and the mesh of ranks that share it."""
        # not exported: different parameters over different groups
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
        from torch.distributed.tensor import Shard

        mesh = self.meshes[self.strategy.partial_axes(parameter)]
        group, size = mesh.get_group(sharded_stages.SHARDS), mesh.size(sharded_stages.SHARDS)
        if group not in self.infos:  # torch knows a group by the object that describes it
            self.infos[group] = sharded_stages.mesh_info(mesh)
        return ShardPlacementResult(Shard(sharded_stages.cut_dim(parameter.shape, size)), self.infos[group])

    def zero(self) -> None:
        for p in self.sharded.values():
            p.grad = None
        if self.host is not None:
            self.last, self.missing = False, {*self.numbers.values()}
        for stage in chunks_of(self.module):  # which fully_shard has made FSDPModules
            if self.staged or self.options.reduce_at == "kept":
                sharded_stages.sum_after_backward(stage, False)  # type: ignore[arg-type]
            elif self.options.reduce_at == "last":
                stage.set_requires_gradient_sync(False)  # type: ignore[operator]

    @property
    def staged(self) -> bool:
        """Whether this rank holds stages of a pipeline."""
        return self.around.stage.count > 1

    def begin_last_backward(self, stage: nn.Module) -> None:
        self.last = True
        if not self.staged and self.options.reduce_at != "each":
            sharded_stages.sum_after_backward(stage, True)  # type: ignore[arg-type]

    def end_last_backward(self, stage: nn.Module) -> None:
        if self.staged:
            sharded_stages.sum_kept(stage)  # type: ignore[arg-type]  # as in zero

    def synchronize(self) -> None:
        if self.host is not None:
            assert not self.missing, "backward gave no gradient for some parameters"
            return
        self.around.add_tied(self.module, lambda weight: weight.grad.to_local())  # type: ignore[union-attr]
        for name, p in self.sharded.items():  # reduce-scattered in backward
            assert p.grad is not None
            self.weights[name].grad = sharded_stages.own_part(p.grad)

    def step(self) -> None:
        super().step()
        if self.host is None:
            for weight in self.weights.values():
                weight.grad = None

    def held(self) -> dict[str, list[Tensor]]:
        weights = [*self.weights.values(), *self.frozen_weights.values(), *scales_in(self.module)]
        return {**super().held(), "parameters": weights}

    def held_gradients(self) -> list[Tensor]:
        return []

    def gradient_parts(self) -> dict[str, HeldPart]:
        if self.host is not None:
            return {n: self._part(n, self.host.gradient(i)) for i, n in enumerate(self.sharded)}
        return {
            name: self._part(name, sharded_stages.own_part(p.grad))
            for name, p in self.sharded.items()
            if p.grad is not None
        }

    def weight_parts(self) -> dict[str, HeldPart]:
        trained = {name: self._part(name, weight) for name, weight in self.weights.items()}
        return trained | self.frozen_parts()

    def frozen_parts(self) -> dict[str, HeldPart]:
        return {name: self._part(name, weight) for name, weight in self.frozen_weights.items()}

    def _part(self, name: str, local: Tensor) -> HeldPart:
        mesh, shape = self.meshes[self.axes[name]], self.shapes[name]
        size = mesh.size(sharded_stages.SHARDS)
        first, _ = sharded_stages.held_rows(shape, size, mesh.get_local_rank(sharded_stages.SHARDS))
        if sharded_stages.cut_shape(shape, size) != shape:
            return HeldPart(local.flatten(), first * shape[-1])
        return HeldPart(local, first, sharded_stages.cut_dim(shape, size))

    @classmethod
    def tied_bytes(cls, step: PlannedStep, elements: int) -> int:
        options, place = step.options, step.around.place
        assert isinstance(options, ShardingOptions)
        weight = step.around.tied(step.build())
        assert weight is not None
        axes = summed_axes(step.strategy.partial_axes(weight))
        size = options.sharing(place.size(*axes))
        _, rows = sharded_stages.held_rows(weight.shape, size, place.rank(*axes) % size)
        wide = step.precision.master and options.state_dtype == "fp32" and not options.masters_on_host
        width = 4 if wide else step.precision.parameters.itemsize
        return elements // weight.shape[sharded_stages.cut_dim(weight.shape, size)] * rows * width

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        assert isinstance(step.options, ShardingOptions)
        return sharded_stages.sharded_traffic(
            step, cls.gradient_dtype(step.precision, step.options), cls.reshards
        )


class KeptAfterForward(FullySharded):
    """ZeRO-2: the weights stay from forward to backward."""

    name = "zero2"
    shares_out = frozenset({"optimizer_state", "gradients"})
    reshard_after_forward = False


def _count_hooks(unit: nn.Module, weights: int, shared: bool) -> None:
    """Count what torch's hooks of a unit of ``weights`` parameters, which ranks share or one rank has, cost
    the host in each forward and backward of the unit."""
    forward, backward = (min(_MOST_CALLS, each + of * weights) for each, of in HOOK_CALLS[shared])

    def count(unit: nn.Module, inputs: Any, outputs: Any) -> None:
        host_works(forward)
        differentiable = (x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad)
        for x in islice(differentiable, 1):
            x.register_hook(lambda gradient: host_works(backward))

    unit.register_forward_hook(count)
