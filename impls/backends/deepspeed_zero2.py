"""ZeRO-2 and ZeRO-1 as DeepSpeed runs them (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py; Rajbhandari et
al., arXiv 1910.02054).

Matrices are one flat tensor and vectors another, as transformers' Trainer groups them for their weight decay.
Each is padded and cut into one partition for each rank, whose float32 copy the optimizer updates. An
all-gather of each flat tensor follows: ``allgather_bucket_size`` is for a torch without
all_gather_into_tensor.

A gradient is put into a bucket: in each backward by ZeRO-2, in a step's last one (``overlap_comm``) or after
it, in the order of the weights, by ZeRO-1. A full bucket is all-reduced or, without
``use_multi_rank_bucket_allreduce``, reduced to the owner of each part. A rank keeps the whole sum of each
gradient of which its partitions have a part, and adds micro-batches up in the weights' dtype.

DeepSpeed divides a gradient by the number of ranks; a loss of this suite is divided already, so the operator
divides by 1.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.backend import HeldPart
from spbench.impls.backends.buckets import weakly
from spbench.impls.backends.deepspeed_stage import DeepSpeedOptions, DeepSpeedStage
from spbench.impls.backends.flat import FlatShard, padded
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.collectives import all_gather_in_place, all_reduce
from spbench.impls.composition import by_partial_axes, trained_parameters
from spbench.impls.observed_work import host_works
from spbench.impls.rings import wait_for_device
from spbench.impls.traffic import Traffic

#: what DeepSpeed's hook costs the host for each weight in a backward, in calls of a module: the mean of two
#: runs of scripts/program_host.py on a busy machine, 19 and 16
HOOK_CALLS = 18
#: each partition is padded to a multiple of these elements (nccl_start_alignment_factor)
ALIGNMENT = 2

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class DeepSpeedZero2Options(DeepSpeedOptions):
    """Options of :class:`DeepSpeedZero2`.

    Attributes:
        reduce_scatter: cut a bucket by owners before it is sent; else the bucket is all-reduced as it is.
        use_multi_rank_bucket_allreduce: all-reduce the parts of all owners together, instead of a reduction
            to each owner.
    """

    reduce_scatter: bool = True
    use_multi_rank_bucket_allreduce: bool = True

    @property
    def to_owners(self) -> bool:
        """Whether gradients are reduced to their owners."""
        cut = self.contiguous_gradients and self.reduce_scatter
        return cut and not self.use_multi_rank_bucket_allreduce


class DeepSpeedZero2(DeepSpeedStage):
    """DeepSpeed's ZeRO-2 with the optimizer on the device."""

    name = "deepspeed_zero2"
    shares_out = frozenset({"optimizer_state", "gradients"})
    options_type = DeepSpeedZero2Options
    options: DeepSpeedZero2Options
    #: whether gradients are summed over ranks, and freed, in each micro-batch
    partitioned: ClassVar[bool] = True

    def prepare(self) -> Optimizer:
        #: the partition of each flat tensor of weights, the flat tensor, and its weights
        self.units: list[tuple[FlatShard, Tensor, list[nn.Parameter]]] = []
        #: of each weight: the group that shares it, and (owner, elements) of its parts
        self.cuts_of: dict[nn.Parameter, tuple[Group, list[tuple[int, int]]]] = {}
        #: this rank's parts of the weights
        self.parts: dict[nn.Parameter, HeldPart] = {}
        for group, parameters in self.summed():
            for part in _flat_tensors(self.module, parameters):
                by_name = {self.names[p]: p for p in part}
                unit = FlatShard(by_name, group, self.precision, align=ALIGNMENT)
                flat = unit.flattened(part)
                cuts = _cuts(unit.sizes, unit.lengths[0])
                for p, owners, view in zip(part, cuts, unit.views(flat).values(), strict=True):
                    self.cuts_of[p], p.data = (group, owners), view
                    p.register_post_accumulate_grad_hook(weakly(self._accumulated))
                self.parts |= {by_name[name]: held for name, held in unit.parts(unit.weights).items()}
                self.units.append((unit, flat, part))
        self.groups = [*dict.fromkeys(group for group, _ in self.cuts_of.values())]
        self.open_streams(self.units[0][1].device.type if self.units else "cpu", 1)
        self.buffers: list[Tensor] = []
        self.zero()
        masters = [unit.weights for unit, *_ in self.units]
        return self.make_optimizer(masters, masters=False, shard_groups=self.groups)

    def zero(self) -> None:
        #: gradients in the bucket, and their elements
        self.bucket: list[tuple[nn.Parameter, Tensor]] = []
        self.filled, self.last = 0, False
        #: whole sums of gradients of which this rank has parts: of earlier micro-batches, and of this one
        self.own: dict[nn.Parameter, Tensor] = {}
        self.new: dict[nn.Parameter, Tensor] = {}
        self._release()

    def _release(self) -> None:
        """Free all gradients but this rank's sums, and the buffers."""
        for p in self.names:
            p.grad = None
        self.missing, self.index = {*self.names}, 0
        self.buffers.clear()

    def begin_last_backward(self, stage: nn.Module) -> None:
        self.last = True

    @torch.no_grad()
    def _accumulated(self, p: nn.Parameter) -> None:
        """Hook: take a gradient."""
        host_works(HOOK_CALLS)
        options, gradient = self.options, p.grad
        assert gradient is not None
        if options.contiguous_gradients and not self.buffers:
            size, number = options.reduce_bucket_size, 1 + options.overlap_comm
            self.buffers += [gradient.new_empty(size) for _ in range(number)]
        if not self.partitioned and not (options.overlap_comm and self.last):
            return
        if p not in self.missing:  # a weight had no gradient in the micro-batch before
            self._finish()
        self._take(p)
        self.missing.discard(p)
        if not self.missing:
            self._finish()

    def _take(self, p: nn.Parameter) -> None:
        """Put a gradient into the bucket; one that is larger than the bucket is alone in it."""
        gradient, most = p.grad, self.options.reduce_bucket_size
        assert gradient is not None
        if self.filled + p.numel() > most:
            self._reduce()
            self.index = (self.index + 1) % max(1, len(self.buffers))
        if self.buffers and p.numel() <= most:
            place = self.buffers[self.index][self.filled : self.filled + p.numel()]
            gradient = place.view_as(p).copy_(gradient)
            p.grad = None
        self.bucket.append((p, gradient))
        self.filled += p.numel()

    def _reduce(self) -> None:
        """Sum the gradients of the bucket over ranks, and keep those of which this rank has parts."""
        bucket, self.bucket, filled, self.filled = self.bucket, [], self.filled, 0
        if not bucket:
            return
        first, flat = bucket[0][1], self.buffers[self.index : self.index + 1]
        if flat and self.streams[0] is not None:
            self.behind_compute(0, first)
            # for the sums before
            torch.get_device_module(first.device).current_stream().wait_stream(self.streams[0])
        with self.on(0, first):
            if filled > self.options.reduce_bucket_size:
                whole = first.flatten()
            else:
                whole = flat[0][:filled] if flat else torch.cat([x.flatten() for _, x in bucket])
            for group, owner, pieces in self._messages([p for p, _ in bucket], whole.div_(1)):
                self._sum(group, owner, pieces)
            for (p, gradient), values in zip(
                bucket, whole.split([x.numel() for _, x in bucket]), strict=True
            ):
                if not flat:
                    gradient.copy_(values.view_as(p))
                if p in self.parts:
                    self.new[p] = self._copy(p, gradient) if flat else gradient
                if self.partitioned:
                    p.grad = None

    def _copy(self, p: nn.Parameter, gradient: Tensor) -> Tensor:
        """A copy of a gradient, in memory for all of this micro-batch that the rank keeps."""
        if not self.new:
            sizes = [each.numel() for each in self.parts]
            self.copies = dict(zip(self.parts, gradient.new_empty(sum(sizes)).split(sizes), strict=True))
        return self.copies.pop(p).view_as(p).copy_(gradient)

    def _messages(
        self, weights: Sequence[nn.Parameter], whole: Tensor
    ) -> Iterator[tuple[Group, int | None, list[tuple[Tensor, int | None]]]]:
        """Yields (group, the rank that alone gets the sum, pieces, each with the rank that keeps it) of the
        messages of a flat bucket; None: every rank. Pieces of one rank that follow each other are one."""
        cut, most = self.options.reduce_scatter and bool(self.buffers), self.options.reduce_bucket_size
        cuts = [
            (self.cuts_of[p][0], owner if cut else None, n)
            for p in weights
            for owner, n in self.cuts_of[p][1]
        ]
        sent: dict[tuple[Group, int | None], list[tuple[Tensor, int | None]]] = {}
        at = 0
        for (group, keeper), run in groupby(cuts, lambda each: each[:2]):
            end = at + sum(n for _, _, n in run)
            sent.setdefault((group, keeper if self.options.to_owners else None), []).append(
                (whole[at:end], keeper)
            )
            at = end
        for (group, owner), pieces in sent.items():
            begin, elements = 0, 0
            for number, (piece, _) in enumerate(pieces, 1):
                elements += piece.numel()
                if elements > most or number == len(pieces):
                    yield group, owner, pieces[begin:number]
                    begin, elements = number, 0

    def _sum(self, group: Group, owner: int | None, pieces: list[tuple[Tensor, int | None]]) -> None:
        """Sum pieces over the group in one message, and copy back the sums that this rank keeps."""
        if self.options.overlap_comm and (owner is not None or not self.buffers):
            wait_for_device(pieces[0][0])
        message = pieces[0][0] if len(pieces) == 1 else torch.cat([piece for piece, _ in pieces])
        summed = message.to(self.wide(message.dtype))
        rank = 0 if group is None else group.rank()
        if owner is None:
            all_reduce(summed, group)
        elif group is not None and group.size() > 1:
            dist.reduce(summed, group=group, group_dst=owner)
        if summed is not message and owner in (None, rank):
            message.copy_(summed)
        for (piece, keeper), values in zip(pieces, summed.split([x.numel() for x, _ in pieces]), strict=True):
            if keeper == rank or (keeper is None and piece is not message):
                piece.copy_(values)

    def _finish(self) -> None:
        """At the end of a backward that sums gradients: sum what is left, and add this rank's up."""
        self._reduce()
        if self.options.overlap_comm and self.new:
            wait_for_device(self.units[0][1])
        for p, gradient in self.new.items():
            self.own[p] = self.own[p].add_(gradient) if p in self.own else gradient
        self.new = {}
        self._release()

    @torch.no_grad()
    def synchronize(self) -> None:
        if not self.partitioned and not self.options.overlap_comm:
            for p in self.cuts_of:
                if p.grad is not None:
                    self._take(p)
        self._finish()

    @torch.no_grad()
    def step(self) -> None:
        if self.precision.master:
            bad = self.units[0][1].new_zeros(1)
            for part in self.gradient_parts().values():
                bad += torch.stack(part.values.aminmax()).isfinite().all().logical_not()
            flag = bad.bool().byte()
            for group in self.groups:
                all_reduce(flag, group, dist.ReduceOp.MAX)
            wait_for_device(flag)
        for unit, _, weights in self.units:
            parts = self._parts(weights).values()
            norms = [part.values.double().norm() for part in parts] or [unit.weights.new_zeros([])]
            all_reduce(torch.stack(norms).pow(2).sum().float(), unit.group)
            wait_for_device(unit.weights)
        gradients = [partial(self._gradient, unit.weights, weights) for unit, _, weights in self.units]
        shards = [unit.shards(flat)[unit.rank] for unit, flat, _ in self.units]
        self.update(gradients, [unit.weights for unit, *_ in self.units], shards)
        for unit, flat, _ in self.units:
            if unit.group is not None and unit.size > 1:
                all_gather_in_place(flat, unit.group, begin=False)

    def _parts(self, weights: Iterable[nn.Parameter]) -> dict[str, HeldPart]:
        """This rank's parts of the summed gradients of weights, by name."""
        parts = {}
        for p in filter(self.parts.__contains__, weights):
            part, whole = self.parts[p], self.own[p] if p in self.own else torch.zeros_like(p)
            parts[self.names[p]] = HeldPart(part.of(whole), part.start)
        return parts

    def _gradient(self, master: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
        """The gradient of a partition with these weights; frees their sums."""
        pieces = [part.values for part in self._parts(weights).values()]
        padding = self.units[0][1].new_zeros(len(master) - sum(map(len, pieces)))
        gradient = torch.cat([*pieces, padding]).to(master.dtype)
        for p in weights:
            self.own.pop(p, None)
        return gradient

    def held(self) -> dict[str, list[Tensor]]:
        masters = [unit.weights for unit, *_ in self.units]
        return {**super().held(), "optimizer_state": [*masters, *self.optimizer.tensors()]}

    def held_gradients(self) -> list[Tensor]:
        return []

    def gradient_parts(self) -> dict[str, HeldPart]:
        return self._parts(self.parts)

    def gradient_places(self) -> dict[str, HeldPart]:
        return {self.names[p]: part for p, part in self.parts.items()}

    @classmethod
    def shares_whole_weights(cls, options: Any) -> bool:
        return True  # a rank keeps whole gradients of the weights of which it updates a part

    @classmethod
    def whole_weights(cls, module: nn.Module, parameters: list[nn.Parameter], ranks: int) -> Counter[int]:
        by_rank = Counter[int]()
        for sizes in ([p.numel() for p in part] for part in _flat_tensors(module, parameters)):
            cuts = _cuts(sizes, padded(sum(sizes), ALIGNMENT * ranks) // ranks)
            for size, owners in zip(sizes, cuts, strict=True):
                by_rank.update({owner: size for owner, _ in owners})
        return by_rank

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        options, width = step.options, step.element_bytes
        assert isinstance(options, DeepSpeedZero2Options)
        wide = max(4, width) if options.reduce_dtype == "fp32" else width
        module = step.build()
        sets = by_partial_axes(trained_parameters(module), step.strategy)
        phase = "backward" if cls.partitioned or options.overlap_comm else "gradient_sync"
        kind, count = "reduce" if options.to_owners else "all_reduce", step.micro_batches
        for each in step.summed:
            group = each.group_axes
            units = [sum(p.numel() for p in part) for part in _flat_tensors(module, sets[each.axes])]
            yield Traffic(phase, "gradients", kind, count if cls.partitioned else 1, sum(units) * wide, group)
            yield Traffic("optimizer", "norms", "all_reduce", len(units), 4, group)
            whole = sum(padded(n, ALIGNMENT * each.size) for n in units) * width
            yield Traffic("optimizer", "updated weights", "all_gather", 1, whole, group)
            if step.precision.master:
                yield Traffic("optimizer", "overflow", "all_reduce", 1, 1, group)
            if step.precision.loss_scale:
                yield Traffic("optimizer", "overflow over shards", "all_reduce", 1, 4, group)


class DeepSpeedZero1(DeepSpeedZero2):
    """DeepSpeed's ZeRO-1: gradients are whole until a step's last backward."""

    name = "deepspeed_zero1"
    shares_out = frozenset({"optimizer_state"})
    partitioned = False


def _flat_tensors(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The weights of each flat tensor: matrices and vectors, as far as there are some, each with the module's
    own weights, such as a head, at its end."""
    own = {*module.parameters(recurse=False)}
    parts = [[p for p in parameters if (p.dim() > 1) == matrices] for matrices in (True, False)]
    return [sorted(part, key=own.__contains__) for part in parts if part]


def _cuts(sizes: Sequence[int], each: int) -> Iterator[list[tuple[int, int]]]:
    """For each weight of a flat tensor whose partitions have ``each`` elements: (the rank that owns a part,
    the part's elements)."""
    first = 0
    for size in sizes:
        edges = [first, *range((first // each + 1) * each, first + size, each), first + size]
        yield [(start // each, end - start) for start, end in pairwise(edges)]
        first += size
