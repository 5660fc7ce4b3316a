"""The options of the backend ``megatron``; docs/reference/arguments.md names Megatron-LM's flag of each.

:class:`ClippedGradients` computes the norm of all gradients over all ranks, and scales gradients down to a
largest norm, as megatron/core/optimizer/clip_grads.py of NVIDIA/Megatron-LM (commit d98e8a64) does.

:func:`sum_of_squares` sums many gradients in one kernel: multi_tensor_l2norm of apex and TransformerEngine.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.backends.buffer_layout import Sharding
from spbench.impls.backends.optimizer_options import OptimizerOptions
from spbench.impls.collectives import all_reduce
from spbench.impls.composition import Composition
from spbench.impls.kernels.operator import operator
from spbench.impls.layout import Unsupported, is_expert, shard_of
from spbench.impls.options import Saving
from spbench.impls.place import Place
from spbench.impls.rings import wait_for_device
from spbench.impls.traffic import Traffic

#: elements of a bucket by default: at least LEAST_BUCKET_SIZE, and BUCKET_SIZE_PER_REPLICA for each replica
LEAST_BUCKET_SIZE, BUCKET_SIZE_PER_REPLICA = 40_000_000, 1_000_000


@dataclass(frozen=True)
class MegatronOptions(OptimizerOptions):
    """Options of :class:`Megatron`.

    Attributes:
        distributed_optimizer: shard main weights and moments over the ranks of a group.
        num_distributed_optimizer_instances: number of runs of the group's ranks, each of which shards all
            weights. Gradients are reduce-scattered within a run, and then summed over the runs.
        overlap_grad_reduce: sum gradients bucket by bucket in the last micro-batch's backward.
        overlap_param_gather: gather updated weights bucket by bucket in the next step's forward.
        align_param_gather: in an interleaved schedule all stages of a pipeline begin to gather a run of
            layers at once: the first two runs before the first micro-batch, a later run when the first stage
            begins the run before (--no-align-param-gather: each when its first micro-batch needs it).
        gradient_accumulation_fusion: linear layers add their gradients to the main gradients themselves.
        defer_embedding_wgrad_compute: the head's weight gradient is computed after the last backward, for
            the first ``wgrad_deferral_limit`` micro-batches (0: for all); its operands are held until then.
        bucket_size: elements at which a bucket is full, where gradients are summed in buckets; None:
            Megatron-Core's default.
        fp8_param_gather: weights whose matmuls are in eight bits by one scale each (``model_options.fp8``)
            are kept and gathered as one byte an element, and cast from the main weights.
        pad_buckets_for_high_nccl_busbw: pad a sharded bucket to a multiple of 2^16 elements.
        accumulate_allreduce_grads_in_fp32: main gradients are float32; else they have the dtype of the
            weights.
        exp_avg_dtype: the dtype of Adam's moments: "fp32", or, only in bf16 runs, "bf16" with main weights in
            float32, as in Megatron-Bridge's recipes of DeepSeek's family.
        check_for_nan_in_loss_and_grad: look for NaN in the loss of each micro-batch, and in the norm of each
            bucket before it is summed, for which the host waits; not where the loss is scaled.
        clip_grad: scale gradients down to this norm over all ranks; 0: the norm is not computed.
        overlap_cpu_optimizer_d2h_h2d: with ``optimizer: host``, copies have streams of their own, and each
            weight is updated as soon as its gradient has arrived.
        optimizer_offload_fraction: with ``optimizer: host``, the share of a rank's main weights that is on
            the host: the first weights, counted for experts and for other weights apart.
        use_precision_aware_optimizer: with ``optimizer: host``, only the host has main weights, as
            Megatron-LM asks for; if False, the device has float32 main weights too (Megatron-Bridge's
            recipes).
        update: the optimizer: "adam", or "muon" for weights that are matrices
            (:mod:`spbench.impls.backends.muon`). With ``distributed_optimizer`` Muon updates whole matrices,
            on one rank each.
        muon_steps: the number of Newton-Schulz steps.
        muon_tp_mode: "duplicated": ranks that hold parts of a matrix gather its moment, and each rank
            orthogonalises the whole; "blockwise": each rank orthogonalises its part.
        layer_wise_layout: with Muon and ``distributed_optimizer``, buckets are packed by rank, and weights
            that are no matrices are sharded as without Muon; if False, gradients are summed on all ranks, and
            each rank updates some whole weights (--no-use-layer-wise-param-layout).
    """

    distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    fp8_param_gather: bool = False
    align_param_gather: bool = True
    gradient_accumulation_fusion: bool = True
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    bucket_size: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    accumulate_allreduce_grads_in_fp32: bool = True
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    check_for_nan_in_loss_and_grad: bool = True
    clip_grad: float = 1.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    optimizer_offload_fraction: float = 1.0
    use_precision_aware_optimizer: bool = True
    update: Literal["adam", "muon"] = "adam"
    muon_steps: int = 5
    muon_tp_mode: Literal["duplicated", "blockwise"] = "duplicated"
    layer_wise_layout: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "host" and not self.distributed_optimizer:
            raise ValueError("optimizer: host needs distributed_optimizer, as Megatron-Core's does")
        if self.overlap_cpu_optimizer_d2h_h2d and self.optimizer == "device":
            raise ValueError("overlap_cpu_optimizer_d2h_h2d needs optimizer: host; set that, or leave it out")
        fraction = self.optimizer_offload_fraction
        if not 0 < fraction <= 1:
            raise ValueError(f"optimizer_offload_fraction is above 0, at most 1, not {fraction}")
        if fraction < 1 and self.optimizer == "device":
            raise ValueError("optimizer_offload_fraction needs optimizer: host; set that, or leave it out")
        if self.exp_avg_dtype == "bf16" and (self.optimizer == "host" or self.update == "muon"):
            raise ValueError("exp_avg_dtype: bf16 needs update: adam, with its optimizer on the device")
        if self.clip_grad < 0:
            raise ValueError(f"clip_grad is a norm above 0, or 0 for none, not {self.clip_grad}")
        if not self.use_precision_aware_optimizer and self.optimizer == "device":
            raise ValueError("use_precision_aware_optimizer: false needs optimizer: host")
        if self.defer_embedding_wgrad_compute and not self.gradient_accumulation_fusion:
            raise ValueError("defer_embedding_wgrad_compute needs gradient_accumulation_fusion")
        limit = self.wgrad_deferral_limit
        if limit < 0 or (limit and not self.defer_embedding_wgrad_compute):
            raise ValueError("wgrad_deferral_limit is at least 0, and needs defer_embedding_wgrad_compute")
        self._check_muon()
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs distributed_optimizer and overlap_grad_reduce")
        if self.fp8_param_gather and (not self.distributed_optimizer or self.optimizer == "host"):
            raise ValueError("fp8_param_gather needs distributed_optimizer, with its optimizer on the device")
        if self.fp8_param_gather and self.update == "muon":
            raise ValueError("update: muon has no fp8_param_gather; leave one out")
        if self.num_distributed_optimizer_instances > 1 and not self.distributed_optimizer:
            raise ValueError("num_distributed_optimizer_instances needs distributed_optimizer")
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size is a number of elements from 1 on, not {self.bucket_size}")

    def _check_muon(self) -> None:
        if self.muon_steps < 1:
            raise ValueError(f"muon_steps is a number of steps from 1 on, not {self.muon_steps}")
        own = {"muon_steps": 5, "muon_tp_mode": "duplicated", "layer_wise_layout": True}
        if self.update == "adam":
            for name, default in own.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name} needs update: muon; set that, or leave it out")
            return
        if not self.layer_wise_layout and not self.distributed_optimizer:
            raise ValueError("layer_wise_layout: false needs distributed_optimizer")
        for there, what in (
            (self.optimizer == "host", "optimizer: host"),
            (self.num_distributed_optimizer_instances > 1, "num_distributed_optimizer_instances"),
            (
                self.overlap_param_gather and not self.layer_wise_layout,
                "overlap_param_gather without a layout",
            ),
        ):
            if there:
                raise ValueError(f"update: muon has no {what}; leave one out")

    @property
    def packs(self) -> bool:
        """Whether matrices have buckets of their own, in which each rank's part has whole matrices."""
        return self.update == "muon" and self.distributed_optimizer and self.layer_wise_layout

    @property
    def deals(self) -> bool:
        """Whether each rank updates some whole weights, and sends them to the other ranks."""
        return self.update == "muon" and self.distributed_optimizer and not self.layer_wise_layout

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """Yields the settings that a search for the fastest layout tries (:meth:`Options.searched`)."""
        overlapped = {"overlap_grad_reduce": True}
        yield {"distributed_optimizer": True, **overlapped, "overlap_param_gather": True}
        yield overlapped
        on_host = {"optimizer": "host", "overlap_cpu_optimizer_d2h_h2d": True}
        yield {"distributed_optimizer": True, **overlapped, "overlap_param_gather": True, **on_host}

    def savings(self) -> Iterator[Saving]:
        if not self.distributed_optimizer:
            words = "main weights and moments are shared out among replicas"
            yield Saving({"distributed_optimizer": True}, words)
        if self.optimizer == "device":
            words = "the host holds main weights and moments of a rank's part, and updates them"
            yield Saving({"distributed_optimizer": True, "optimizer": "host"}, words)

    def full_at(self, around: Composition, chunk: int = 0) -> int | None:
        """Elements at which a bucket is full on this rank; None: there is one bucket. Later stages of the
        pipeline and later chunks of a rank have one bucket, since their sums are not on the critical path."""
        if not self.overlap_grad_reduce or not around.stage.first or chunk:
            return None
        return self.bucket_size or max(LEAST_BUCKET_SIZE, BUCKET_SIZE_PER_REPLICA * around.replicas)

    def sharing(self, ranks: int) -> int:
        """Number of ranks, out of ``ranks``, that shard one gradient buffer.

        Raises:
            Unsupported: the instances of the optimizer do not divide ``ranks``.
        """
        instances = self.num_distributed_optimizer_instances
        if ranks % instances:
            raise Unsupported(
                f"{instances} instances of the optimizer cannot share {ranks} ranks",
                f"set num_distributed_optimizer_instances to a divisor of {ranks}",
            )
        return ranks // instances

    def sharding(self, ranks: int) -> Sharding | None:
        """How a buffer whose gradients are summed over ``ranks`` ranks is sharded; None: not at all."""
        padded = self.pad_buckets_for_high_nccl_busbw
        shards = self.distributed_optimizer and not self.deals
        return Sharding(self.sharing(ranks), padded) if shards else None


#: added to a norm before a division by the norm
_EPSILON = 1e-6


class ClippedGradients:
    """Scales gradients so that their norm over all ranks is at most ``largest``.

    A rank holds some elements of some gradients, and other ranks may hold the same elements. So elements
    count by a share: 1 / the number of ranks of the stage that hold them.

    Args:
        shares: of each gradient that is passed to :meth:`clip`, in order, the shares of its elements: pairs
            of a number of elements, one run after the other, and their share.
    """

    def __init__(self, place: Place, largest: float, shares: Sequence[Sequence[tuple[int, float]]]):
        self.largest, self.runs = largest, [[run for run, _ in of_one] for of_one in shares]
        self.shares = [share for of_one in shares for _, share in of_one]
        self.groups: list[dist.ProcessGroup | None] = [
            place.group(*place.stage_axes),
            place.group("pp"),
        ]
        #: the norm [] of the last step's gradients before they were scaled
        self.norm: Tensor | None = None

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor], scale: Tensor | None = None) -> None:
        """Scale the gradients in place.

        Args:
            scale: the loss scale by which gradients are still multiplied; None: gradients are not scaled.
        """
        alike: list[Tensor] = []
        for gradient, runs in zip(gradients, self.runs, strict=True):
            # a gradient of one run stays whole, because a split costs the host time
            alike += gradient.view(-1).split(runs) if len(runs) > 1 else [gradient]
        squares = sum_of_squares(alike, self.shares)
        for group in self.groups:
            all_reduce(squares, group)
        self.norm = squares.sqrt_() if scale is None else squares.sqrt_() / scale
        wait_for_device(self.norm)
        coefficient = (self.largest / (self.norm + _EPSILON)).clamp_(max=1.0)
        torch._foreach_mul_([*gradients], coefficient)


def held_shares(p: Tensor, elements: slice, place: Place, sharing: int) -> list[tuple[int, float]]:
    """Runs of elements of a parameter's flattened gradient: (their number, 1 / the number of ranks of a
    pipeline stage that hold them).

    Args:
        sharing: number of ranks that share the part of one rank of the strategy.
    """
    start, end, _ = elements.indices(p.numel())
    shard, replicated, ranks = shard_of(p), 0, 1
    if shard:
        replicated, ranks = shard.replicated(p.shape)
    parts = sharing * (shard.parts if shard else 1) * (place.size("ep") if is_expert(p) else 1)
    share, border = parts / place.size(*place.stage_axes), min(max(p.numel() - replicated, start), end)
    return [(border - start, share), *([(end - border, share / ranks)] if end > border else [])]


def norm_traffic(place: Place, element_bytes: int) -> list[Traffic]:
    """The closed form of the messages of :class:`ClippedGradients` in a step.

    Args:
        element_bytes: bytes of an element of the weights.
    """
    nbytes = max(4, element_bytes)
    return [
        Traffic("optimizer", purpose, "all_reduce", 1, nbytes, tuple(axes))
        for purpose, axes in (("norm over a stage", place.stage_axes), ("norm over stages", ["pp"]))
        if axes and place.size(*axes) > 1
    ]


@operator("spbench::sum_of_squares", fake=lambda tensors, shares: _zero(tensors))
def sum_of_squares(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The sum [] of the squares of all elements, each times its tensor's share, in at least float32."""
    total = _zero(tensors)
    for x, share in zip(tensors, shares, strict=True):
        total += x.to(total.dtype).square().sum() * share
    return total


def _zero(tensors: Sequence[Tensor]) -> Tensor:
    some = tensors[0]
    return some.new_zeros((), dtype=torch.promote_types(some.dtype, torch.float32))
