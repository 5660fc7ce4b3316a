"""Cross entropy over a vocabulary of V rows on N ranks (Megatron-LM, arXiv 1909.08053 section 3)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.collectives import all_gather_flat, all_reduce
from spbench.impls.kernels.operator import operator


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        # nothing else reads these full-precision logits, so every step below overwrites their memory
        part = logits.shape[-1]
        first = 0 if group is None else group.rank() * part
        top = all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
        logits.sub_(top.unsqueeze(-1))

        elsewhere = (labels < first) | (labels >= first + part)
        local = (labels - first).masked_fill_(elsewhere, 0).unsqueeze(-1)
        predicted = logits.gather(-1, local).squeeze(-1).masked_fill_(elsewhere, 0)
        all_reduce(predicted, group)

        exponentials = logits.exp_()
        total = all_reduce(exponentials.sum(-1), group)
        loss = total.log() - predicted
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, elsewhere, local)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, elsewhere, local = ctx.saved_tensors
        hit = (~elsewhere).unsqueeze(-1).to(softmax.dtype)
        d_logits = softmax.scatter_add_(-1, local, hit.neg_())
        return d_logits.mul_(gradient.unsqueeze(-1)), None, None


def _own_full_precision(logits: Tensor) -> Tensor:
    """A copy of the logits in at least float32."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits.clone()


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Per-token loss [B, L] from this rank's part of the logits [B, L, V/N] and whole labels [B, L].

    Shifted logits, exponentials, softmax and gradient share the memory of one full-precision tensor of the
    logits' shape, so backward can run only once.
    """
    return _VocabParallelCrossEntropy.apply(_own_full_precision(logits), labels, group)


@dataclass(frozen=True)
class Autotuning:
    """The memory that torch.compile allocates while it times versions of a kernel, before its first call.

    Attributes:
        flush_bytes: bytes of the buffer that is written between runs to clear the L2 cache: 256 MB (Triton's
            do_bench, which inductor called until torch 2.6), or the size of that cache (InductorBenchmarker
            of torch/_inductor/runtime/benchmarking.py).
        copies: tensors as large as the full-precision logits that backward's last kernel writes to, and that
            are copied for each run; 0: a copy is made only where it raises no peak (since torch 2.6,
            copy_args_to_cpu_if_needed of torch/_inductor/runtime/triton_heuristics.py), else on the host.
    """

    flush_bytes: int
    copies: int = 0

    def scatter(self, precise: Tensor) -> int:
        """Allocate as timing the kernel that scatters into ``precise`` does; returns the bytes by which the
        peak is above the memory that is allocated afterwards."""
        # timing the earlier kernel that makes the tensor had the same peak
        copied = bool(self.copies) or precise.nbytes <= self.flush_bytes
        self._allocate(precise, copied)
        return self.flush_bytes + copied * precise.nbytes

    def scale(self, precise: Tensor, above: int) -> None:
        """Allocate as timing the kernel that scales and converts the gradient does, where the peak is
        ``above`` bytes above the allocated memory."""
        self._allocate(precise, self.copies or precise.nbytes <= above)

    def _allocate(self, like: Tensor, copies: int) -> None:
        held = [torch.empty(self.flush_bytes, dtype=torch.uint8, device=like.device)]
        held += [torch.empty_like(like) for _ in range(copies)]


class _CompiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, tuning: Autotuning | None
    ) -> Tensor:
        ctx.dtype, ctx.tuning = logits.dtype, tuning
        softmax, first = _own_full_precision(logits), _first_row(logits, group)
        top = all_reduce(softmax.amax(-1), group, dist.ReduceOp.MAX)
        softmax.sub_(top.unsqueeze(-1))
        hit, local = _hit(labels, first, softmax.shape[-1])
        own = softmax.gather(-1, local.unsqueeze(-1)).squeeze(-1) * hit
        sums = all_reduce(torch.cat((own, softmax.exp_().sum(-1))), group)
        predicted, total = sums.chunk(2)
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, hit, local)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, hit, local = ctx.saved_tensors
        tuning: Autotuning | None = ctx.tuning
        # the compiler does not scatter into an input that it overwrites later, so it makes a second tensor
        precise = softmax.clone()
        above = 0 if tuning is None else tuning.scatter(precise)
        precise.scatter_add_(-1, local.unsqueeze(-1), hit.to(softmax.dtype).neg_().unsqueeze(-1))
        d_logits = precise.mul_(gradient.unsqueeze(-1)).to(ctx.dtype)
        if tuning is not None:
            tuning.scale(precise, above - d_logits.nbytes)
        return d_logits, None, None, None


def compiled_cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, tuning: Autotuning | None = None
) -> Tensor:
    """Per-token loss [B, L] as :func:`vocab_parallel_cross_entropy`, in the four regions that Megatron-Core
    compiles with torch.compile (core/fusions/fused_cross_entropy.py). One message carries both sums over
    ranks, and backward has the softmax and a second full-precision tensor of the logits' shape.

    Args:
        tuning: memory for timing kernels, in a first call. Only backward's kernels need it, because timing
            forward's kernels does not raise the peak.
    """
    loss: Tensor = _CompiledCrossEntropy.apply(logits, labels, group, tuning)
    return loss


@operator(
    "spbench::cross_entropy_gradient_",
    mutates_args={"logits"},
    fake=lambda logits, statistics, labels, first: statistics.new_empty(labels.shape),
)
def _gradient_(logits: Tensor, statistics: Tensor, labels: Tensor, first: int) -> Tensor:
    """Returns the loss [B, L] from the ``statistics`` [N, 3, B, L] of all parts of the vocabulary (largest
    logit, sum of exponentials, the label's logit or 0), and overwrites the logits [B, L, V/N] with their
    gradient."""
    top, total, loss = _of_the_whole(statistics)
    softmax = (logits.to(statistics.dtype) - top.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
    hit, local = _hit(labels, first, logits.shape[-1])
    softmax.scatter_add_(-1, local.unsqueeze(-1), hit.to(softmax.dtype).neg_().unsqueeze(-1))
    logits.copy_(softmax)
    return loss


def _of_the_whole(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit, sum of exponentials and loss, each [B, L], from all parts' statistics."""
    top = statistics[:, 0].amax(0)
    total = (statistics[:, 1] * (statistics[:, 0] - top).exp()).sum(0)
    return top, total, total.log() + top - statistics[:, 2].sum(0)


def _of_all_parts(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The statistics [N, 3, B, L], or [1, 3, B, 0], in one message where Megatron-LM's loss sends three."""
    own = _statistics(logits, labels, _first_row(logits, group))
    parts = own if group is None else all_gather_flat(own.flatten(), group)
    return parts.view(-1, *own.shape) if own.numel() else own.unsqueeze(0)  # no tokens: one empty part


@operator(
    "spbench::cross_entropy_statistics",
    fake=lambda logits, labels, first: logits.new_empty(
        3, *labels.shape, dtype=torch.promote_types(logits.dtype, torch.float32)
    ),
)
def _statistics(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """A vocabulary part's largest logit, sum of exponentials, and label's logit or 0, stacked [3, B, L]."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = precise.amax(-1)
    total = (precise - top.unsqueeze(-1)).exp_().sum(-1)
    hit, local = _hit(labels, first, logits.shape[-1])
    return torch.stack((top, total, precise.gather(-1, local.unsqueeze(-1)).squeeze(-1) * hit))


def _first_row(logits: Tensor, group: dist.ProcessGroup | None) -> int:
    """The first row of this rank's part of the vocabulary."""
    return 0 if group is None else group.rank() * logits.shape[-1]


def _hit(labels: Tensor, first: int, part: int) -> tuple[Tensor, Tensor]:
    """Whether each label lies in the ``part`` rows from ``first`` on [B, L], and the label's row of this part
    (0 for other labels) [B, L]."""
    hit = (labels >= first) & (labels < first + part)
    return hit, (labels - first) * hit


@operator("spbench::cross_entropy_scale_", mutates_args={"d_logits"})
def _scale_(d_logits: Tensor, gradient: Tensor) -> None:
    """Multiply the gradient of each position's loss [B, L, V/N], in place, by the gradient that arrives for
    this loss [B, L]."""
    d_logits.mul_(gradient.unsqueeze(-1))


class _CrossEntropyInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        parts = _of_all_parts(logits, labels, group)
        loss: Tensor = _gradient_(logits, parts, labels, _first_row(logits, group))
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (d_logits,) = ctx.saved_tensors
        _scale_(d_logits, gradient)
        return d_logits, None, None


def cross_entropy_in_place(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Per-token loss [B, L] in at least float32 from this rank's part of the logits [B, L, V/N] and whole
    labels [B, L], as TransformerEngine's parallel_cross_entropy. Forward overwrites the logits with their
    gradient in the same precision, without a copy, so nothing else may read the logits. Backward can run only
    once."""
    loss: Tensor = _CrossEntropyInPlace.apply(logits, labels, group)
    return loss


class _CrossEntropyInOneRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        parts = _of_all_parts(logits, labels, group)
        ctx.save_for_backward(logits, parts, labels)
        ctx.first = _first_row(logits, group)
        return _of_the_whole(parts)[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, parts, labels = ctx.saved_tensors
        d_logits = logits.clone()
        _gradient_(d_logits, parts, labels, ctx.first)
        _scale_(d_logits, gradient)
        return d_logits, None, None


def cross_entropy_in_one_region(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Per-token loss [B, L] as :func:`cross_entropy_in_place`, but as torch.compile fuses the cast of
    half-precision logits with torch's cross entropy: without a float32 copy. Backward needs the logits and
    each position's statistics; the gradient has the precision of the logits and its own memory."""
    loss: Tensor = _CrossEntropyInOneRegion.apply(logits, labels, group)
    return loss


class _LossParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        first = _first_row(logits, group)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shifted = precise - all_reduce(precise.amax(-1), group, dist.ReduceOp.MAX).unsqueeze(-1)
        total = all_reduce(shifted.exp().sum(-1), group)
        log_softmax = shifted - total.log().unsqueeze(-1)
        hit, local = _hit(labels, first, logits.shape[-1])
        loss = all_reduce(log_softmax.gather(-1, local.unsqueeze(-1)).squeeze(-1) * hit, group).neg_()
        ctx.dtype = logits.dtype
        ctx.save_for_backward(log_softmax, hit, local)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        log_softmax, hit, local = ctx.saved_tensors
        # the same steps as torch, which has three tensors of this shape next to the log-softmax
        labelled = torch.zeros_like(log_softmax)
        labelled.scatter_(-1, local.unsqueeze(-1), hit.to(labelled.dtype).neg_().unsqueeze(-1))
        d_logits = (labelled + log_softmax.exp()) * gradient.unsqueeze(-1)
        del labelled
        return d_logits.to(ctx.dtype), None, None


def loss_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Per-token loss [B, L] as :func:`vocab_parallel_cross_entropy`, by the operators of torch's
    ``loss_parallel`` (torch/distributed/tensor/parallel/loss.py), of which none works in place. Forward makes
    full-precision logits, shifted logits and the log-softmax; backward three tensors of its shape."""
    loss: Tensor = _LossParallel.apply(logits, labels, group)
    return loss


def cross_entropy_as_given(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Per-token loss [B, L] of logits [B, L, V] by torch's own cross entropy; the log-softmax and gradients
    have the precision of the logits, which may be half."""
    assert group is None or group.size() == 1, "torch's own loss takes whole logits"
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


#: (logits that nothing else reads, whole labels, the vocabulary's group) -> the per-token loss [B, L]
CrossEntropy = Callable[[Tensor, Tensor, dist.ProcessGroup | None], Tensor]
#: the functions above, by their names in :class:`DecoderOptions`
CROSS_ENTROPIES: dict[str, CrossEntropy] = {
    "fused": vocab_parallel_cross_entropy,
    "native": compiled_cross_entropy,
    "in_place": cross_entropy_in_place,
    "compiled": cross_entropy_in_one_region,
    "loss_parallel": loss_parallel_cross_entropy,
    "as_given": cross_entropy_as_given,
}


def cross_entropy_of(way: str | CrossEntropy) -> CrossEntropy:
    """The function of :data:`CROSS_ENTROPIES` with this name; a function is returned as it is."""
    return CROSS_ENTROPIES[way] if isinstance(way, str) else way
