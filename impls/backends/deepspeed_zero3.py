"""ZeRO-3 as DeepSpeed runs it (DeepSpeed 0.19.8, runtime/zero: partition_parameters.py, parameter_offload.py,
partitioned_param_coordinator.py and stage3.py; Rajbhandari et al., arXiv 1910.02054).

Each weight is flat, padded and cut into one partition for each rank. A weight is gathered before each use,
the next ones of the trace with it in one flat buffer, out of which they are copied. It is freed after the use
(:class:`Coordinator`). Backward and a second run of a layer gather again.

Each gradient is put into a bucket. A full bucket is cut by ranks into a new flat tensor and reduce-scattered,
and the rank's parts are copied into, or from the second micro-batch on added to, a buffer of the weights'
dtype. After each backward the host waits for these sums. The optimizer updates float32 partitions by
sub-groups, after a norm in float64 and, in float16, a search for infinities; the host waits for both.

DeepSpeed divides a gradient by the number of ranks; a loss of this suite is divided already, so the operator
divides by 1. DeepSpeed gathers the persistent weights at a step's end, this backend before the next forward.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends import parameter_coordinator
from spbench.impls.backends.backend import BytesInBackward, HeldPart
from spbench.impls.backends.buckets import full_runs
from spbench.impls.backends.deepspeed_stage import DeepSpeedStage
from spbench.impls.backends.flat import padded
from spbench.impls.backends.fsdp_flat import take_parameters
from spbench.impls.backends.meta_device import is_meta, materialize
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.collectives import (
    ReusedBuffer,
    all_gather_in_place,
    all_reduce,
    reduce_scatter_in_place,
    start_all_gather,
)
from spbench.impls.observed_work import host_works
from spbench.impls.rings import wait_for_device
from spbench.impls.traffic import Traffic

_preserving_version = torch.autograd._unsafe_preserve_version_counter


class Partitioned(ReusedBuffer):
    """A weight that is whole at times, and this rank's partition of it.

    Args:
        number: the weight's place among all weights.
        group: the ranks that share the weight; None: this rank has all of it.
    """

    def __init__(self, name: str, number: int, p: nn.Parameter, group: dist.ProcessGroup | None, device: str):
        self.name, self.number, self.group = name, number, group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self.elements, self.part = p.numel(), padded(p.numel(), self.size) // self.size
        self.memory = torch.empty(self.part * self.size, dtype=p.dtype, device=device)
        if not is_meta(p):
            self.memory[: self.elements].copy_(p.detach().flatten())
        self.parameter = nn.Parameter(self.memory[: self.elements].view(p.shape))
        # a fake tensor has its device among its attributes
        vars(self.parameter).update({k: v for k, v in vars(p).items() if k not in vars(self.parameter)})
        # LinearFunctionForZeroStage3 of zero/linear.py, which a second run that ends early runs to its end
        self.parameter.spbench_own_function = True  # type: ignore[attr-defined]
        self.start = min(self.rank * self.part, self.elements)
        #: the number of elements of the partition without padding
        self.real = min(self.part, self.elements - self.start)
        self.shard: Tensor
        self.gradient: Tensor

    def cut(self, shard: Tensor, gradient: Tensor) -> None:
        """Move this rank's partition into ``shard`` [part], and free the whole."""
        self.shard, self.gradient = shard, gradient
        shard.copy_(self.memory[self.rank * self.part :][: self.part])
        self.free()

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Lends the memory of the whole, as for :func:`start_all_gather`."""
        storage = self.memory.untyped_storage()
        storage.resize_(self.memory.numel() * self.memory.itemsize)
        return self.memory.view(tuple(shape))

    def free(self) -> None:
        """Free the memory of the whole."""
        self.memory.untyped_storage().resize_(0)

    def part_of(self, values: Tensor) -> HeldPart:
        """The part without padding of a tensor [part]."""
        return HeldPart(values[: self.real], self.start)


class DeepSpeedZero3(DeepSpeedStage):
    """DeepSpeed's ZeRO-3 with the optimizer on the device."""

    name = "deepspeed_zero3"
    shares_out = frozenset({"optimizer_state", "gradients", "parameters"})
    freezes = False
    options_type = parameter_coordinator.DeepSpeedZero3Options
    options: parameter_coordinator.DeepSpeedZero3Options

    @classmethod
    def starts_on_meta(cls, options: Any) -> bool:
        return True  # zero.Init

    @classmethod
    def bytes_in_backward(cls, precision: Precision, options: Any, staged: bool) -> BytesInBackward:
        return BytesInBackward(layer=3 * precision.parameters.itemsize)

    def prepare(self) -> Optimizer:
        groups = {self.names[p]: group for group, parameters in self.summed() for p in parameters}
        events = parameter_coordinator.recorded(self.module)
        device = self.around.gradient_mesh(()).device_type
        taken = {name: p for p, name in self.names.items()}
        owners = take_parameters(self.module, dict(self.names))
        materialize(self.module, device)
        self.names = {}
        self.weights: dict[str, Partitioned] = {}
        for number, (name, p) in enumerate(taken.items()):
            weight = self.weights[name] = Partitioned(name, number, p, groups[name], device)
            for owner, attribute in owners[name]:
                owner.register_parameter(attribute, weight.parameter)
            self.names[weight.parameter] = name
        del taken
        elements = {name: weight.elements for name, weight in self.weights.items()}
        self.coordinator = parameter_coordinator.Coordinator(elements, events, self.options)
        self._cut()
        self.hooks = parameter_coordinator.ModuleHooks(
            self.module, self.names, self._fetch, self._release, self._take, self._begin
        )
        #: gathers under way by weight: (work, flat buffer or None, the weights of the gather)
        self.pending: dict[str, tuple[dist.Work, Tensor | None, list[Partitioned]]] = {}
        #: weights that have been gathered since their last use
        self.fetched: set[str] = set()
        self.bucket: list[tuple[Partitioned, Tensor]] = []
        self.missing: set[str] = set()
        self.gathered = False
        self.open_streams(device, 2)  # of gathers and of gradients
        return self.make_optimizer(self.masters, masters=False, shard_groups={*groups.values()})

    def _cut(self) -> None:
        """Lay the partitions out in sub-groups, with one buffer for all gradients."""
        like = next(iter(self.weights.values())).memory if self.weights else torch.empty(0)
        self.gradients = like.new_zeros(sum(weight.part for weight in self.weights.values()))
        size = self.options.reduce_bucket_size
        self.buffer = like.new_empty(size) if self.options.contiguous_gradients and self.weights else None
        enough = repeat(self.options.sub_group_size)
        self.subgroups = [*full_runs(self.weights.values(), lambda weight: weight.part, enough)]
        #: the flat partitions of each sub-group in the weights' dtype, and for the optimizer
        self.shards: list[Tensor] = []
        first = 0
        for weights in self.subgroups:
            flat = like.new_empty(sum(weight.part for weight in weights))
            for weight, shard in zip(weights, flat.split([w.part for w in weights]), strict=True):
                weight.cut(shard, self.gradients[first : first + weight.part])
                first += weight.part
            self.shards.append(flat)
        wide = torch.float32 if self.precision.master else self.precision.parameters
        self.masters = [flat.to(wide, copy=True) for flat in self.shards]
        self.versions = [flat._version for flat in self.shards]

    def zero(self) -> None:
        for master, flat, version in zip(self.masters, self.shards, self.versions, strict=True):
            if flat._version != version:  # values were set after the masters had been made
                master.copy_(flat)
        self.versions = [flat._version for flat in self.shards]
        self.summed_once: set[str] = set()

    # weights

    @torch.no_grad()
    def _begin(self) -> None:
        """Begin a micro-batch; the first one of a step gathers the persistent weights."""
        self._finish()
        for name in [*self.pending]:
            self._wait(name)
        for name in self.coordinator.whole.difference(self.coordinator.persistent):
            self.weights[name].free()
        self.coordinator.begin()
        self.missing = {*self.weights}
        if not self.gathered and self.coordinator.persistent:
            for name in self.coordinator.persistent:
                self._gather([self.weights[name]])
            for name in self.coordinator.persistent:
                self._wait(name)
            wait_for_device(self.gradients)
        self.gathered = True

    @torch.no_grad()
    def _fetch(self, names: parameter_coordinator.Scope, calls: int) -> None:
        """Make weights whole before their use, and begin to gather the next ones. DeepSpeed waits for the
        event behind the third fetch before (``__max_ongoing_fetch_events``), which is one of the computing
        stream without ``overlap_comm``."""
        host_works(calls, checks=not self.fetched.isdisjoint(names) and self.streams[0] is None)
        self.fetched.difference_update(names)
        now, ahead = self.coordinator.use(names)
        if now:
            self._gather([self.weights[name] for name in now])
        for name in names:
            self._wait(name)
        for later in ahead:
            self._gather([self.weights[name] for name in later])

    def _release(self, names: parameter_coordinator.Scope) -> None:
        for name in names:
            if self.coordinator.release(name):
                self._wait(name)
                self.weights[name].free()

    def _gather(self, weights: list[Partitioned]) -> None:
        """Begin to gather weights, those of a group in one flat buffer."""
        weights = sorted(weights, key=lambda weight: weight.number)
        for of_group in _by_group(weights):
            first, flat = of_group[0], None
            if first.group is None:
                for weight in of_group:
                    with _preserving_version(weight.memory):
                        weight.take(weight.shard.shape, weight.shard).copy_(weight.shard)
                continue
            with self.on(0, self.gradients):
                if len(of_group) == 1:
                    with _preserving_version(first.memory):
                        _, work = start_all_gather(first.shard, first.group, first)
                else:
                    each = sum(weight.part for weight in of_group)
                    flat = first.shard.new_empty(each * first.size)
                    own = flat[first.rank * each : (first.rank + 1) * each]
                    torch.cat([weight.shard for weight in of_group], out=own)
                    begun = all_gather_in_place(flat, first.group, begin=True)
                    assert begun is not None
                    work = begun
            for weight in of_group:
                self.pending[weight.name] = work, flat, of_group
            self.fetched.update(self.pending)

    def _wait(self, name: str) -> None:
        """Wait for a weight that is on its way, and copy the weights of its gather out of the buffer."""
        if name not in self.pending:
            return
        work, flat, weights = self.pending[name]
        with self.on(0, self.gradients):
            work.wait()
            if flat is not None:
                rows, before = flat.view(weights[0].size, -1), 0
                for weight in weights:
                    with _preserving_version(weight.memory):
                        whole = weight.take(weight.memory.shape, flat)
                        pieces = [row[before : before + weight.part] for row in rows.unbind()]
                        torch.cat(pieces, out=whole)
                    before += weight.part
        for weight in weights:
            del self.pending[weight.name]
        if self.streams[0] is not None:
            torch.get_device_module(weights[0].memory.device).current_stream().wait_stream(self.streams[0])

    # gradients

    @torch.no_grad()
    def _take(self, names: parameter_coordinator.Scope) -> None:
        """Put gradients into the bucket."""
        for name in names:
            self._put(self.weights[name])

    def _put(self, weight: Partitioned) -> None:
        gradient, weight.parameter.grad = weight.parameter.grad, None
        assert gradient is not None
        filled = sum(each.elements for each, _ in self.bucket)
        most = self.options.reduce_bucket_size
        if self.bucket and (self.bucket[0][0].group is not weight.group or filled + weight.elements > most):
            self._reduce()
            filled = 0
        self.behind_compute(1, self.gradients)
        if self.buffer is not None and filled + weight.elements <= most:
            with self.on(1, self.gradients):
                place = self.buffer[filled : filled + weight.elements].view_as(gradient)
                gradient = place.copy_(gradient)
        self.bucket.append((weight, gradient))
        self.missing.discard(weight.name)
        if not self.missing:
            self._finish()

    def _finish(self) -> None:
        """At the end of a backward: sum what is left, and let the host wait for the sums."""
        if self.bucket:
            self._reduce()
            wait_for_device(self.gradients)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Sum the gradients of the bucket over their group, and add this rank's partitions up."""
        bucket = sorted(self.bucket, key=lambda each: each[0].number)
        self.bucket = []
        first = bucket[0][0]
        own = first.memory.dtype
        wide = self.wide(own)
        with self.on(1, self.gradients):
            bucket = [(weight, gradient.to(wide)) for weight, gradient in bucket]
            if len(bucket) == 1 and first.elements == first.part * first.size:
                whole = bucket[0][1].flatten()
            else:
                cuts = [_cut_for_ranks(weight, gradient) for weight, gradient in bucket]
                whole = torch.cat([piece for rank in zip(*cuts, strict=True) for piece in rank])
            whole.div_(1)
            if first.group is not None:
                reduce_scatter_in_place(whole, first.group, begin=False)
            before = 0
            parts = whole.chunk(first.size)[first.rank].to(own)
            for (weight, _), part in zip(bucket, parts.split([w.part for w, _ in bucket]), strict=True):
                before += weight.part
                if not weight.real:
                    continue
                held, summed = weight.gradient[: weight.real], part[: weight.real]
                held.add_(summed) if weight.name in self.summed_once else held.copy_(summed)
                self.summed_once.add(weight.name)

    def synchronize(self) -> None:
        self._finish()
        self.around.add_tied(self.module)

    @torch.no_grad()
    def step(self) -> None:
        for name in self.coordinator.persistent:
            self.weights[name].free()
        self.gathered = False
        groups = {weight.group: weight for weight in self.weights.values()}
        if self.precision.loss_scale:
            bad = torch.isinf(self.gradients).any().logical_or_(torch.isnan(self.gradients).any())
            bad = bad.to(torch.uint8)
            for group in groups:
                all_reduce(bad, group, dist.ReduceOp.MAX)
            wait_for_device(self.gradients)
        norms = [weight.gradient.double().norm() for weight in self.weights.values()]
        if norms:
            norm = torch.stack(norms).pow(2).sum()
            for group in groups:
                all_reduce(norm, group)
            wait_for_device(norm)

        def gradient(weights: list[Partitioned], master: Tensor) -> Tensor:
            return torch.cat([weight.gradient for weight in weights]).to(master.dtype)

        pairs = zip(self.subgroups, self.masters, strict=True)
        self.update([partial(gradient, *pair) for pair in pairs], self.masters, self.shards)
        self.versions = [flat._version for flat in self.shards]

    def held(self) -> dict[str, list[Tensor]]:
        state = [*self.masters, *self.optimizer.tensors()]
        return {**super().held(), "parameters": self.shards, "optimizer_state": state}

    def held_gradients(self) -> list[Tensor]:
        return [self.gradients, *([] if self.buffer is None else [self.buffer])]

    def gradient_parts(self) -> dict[str, HeldPart]:
        return {name: weight.part_of(weight.gradient) for name, weight in self._here()}

    def weight_parts(self) -> dict[str, HeldPart]:
        return {name: weight.part_of(weight.shard) for name, weight in self._here()}

    def _here(self) -> Iterator[tuple[str, Partitioned]]:
        return ((name, weight) for name, weight in self.weights.items() if weight.real)

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        options, module = step.options, step.build()
        assert isinstance(options, parameter_coordinator.DeepSpeedZero3Options)
        names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        sums = {each.axes: each for each in step.summed}
        sets = {name: sums[step.strategy.partial_axes(p)] for p, name in names.items()}
        padding = {name: padded(p.numel(), sets[name].size) for p, name in names.items()}
        events = parameter_coordinator.recorded(module)
        elements = {name: p.numel() for p, name in names.items()}
        coordinator = parameter_coordinator.Coordinator(elements, events, options)
        gathers = Counter[tuple[bool, Any]]()
        for backward, scope in parameter_coordinator.replayed(coordinator, events):
            for name in scope:
                gathers[backward, sets[name].axes] += padding[name]
        for axes, summed in sums.items():
            if summed.size == 1:
                continue
            group, mine = summed.group_axes, [name for name, each in sets.items() if each is summed]
            whole = sum(padding[name] for name in mine if name in coordinator.persistent)
            count, width = step.micro_batches, step.element_bytes
            yield Traffic("forward", "persistent weights", "all_gather", 1, whole * width, group)
            for phase in ("forward", "backward"):
                payload = gathers[phase == "backward", axes] * width
                yield Traffic(phase, "weights", "all_gather", count, payload, group)
            width = max(4, width) if options.reduce_dtype == "fp32" else width
            payload = sum(padding[name] for name in mine) * width
            yield Traffic("backward", "gradients", "reduce_scatter", count, payload, group)
            yield Traffic("optimizer", "norm", "all_reduce", 1, 8, group)
            if step.precision.loss_scale:
                yield Traffic("optimizer", "overflow", "all_reduce", 1, 1, group)
                yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, group)


def _by_group(weights: Sequence[Partitioned]) -> list[list[Partitioned]]:
    """The weights by the group that shares them."""
    found: dict[dist.ProcessGroup | None, list[Partitioned]] = {}
    for weight in weights:
        found.setdefault(weight.group, []).append(weight)
    return [*found.values()]


def _cut_for_ranks(weight: Partitioned, gradient: Tensor) -> list[Tensor]:
    """The piece [part] of a gradient for each rank, the last ones padded with arbitrary values."""
    flat, pieces = gradient.flatten(), []
    for rank in range(weight.size):
        pieces.append(flat[rank * weight.part : (rank + 1) * weight.part])
        if missing := weight.part - len(pieces[-1]):
            pieces[-1] = torch.cat([pieces[-1], flat.new_empty(missing)])
    return pieces
