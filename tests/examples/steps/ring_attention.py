"""A training step of a layer with ring attention: each rank has a part of the sequence; keys and values go
round the ring of ranks, in backward with their gradients; needs torch only."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, HEADS, BATCH, LENGTH = 64, 4, 2, 32


def passed_on(x: Tensor) -> Tensor:
    """The tensor of the previous rank of the ring; the next rank gets ``x``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return x
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.P2POp(dist.isend, x, (rank + 1) % ranks)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]):
        work.wait()
    return received


class RingAttention(torch.autograd.Function):
    """Attention of all positions to all positions; q, k, v and the output are [B, Z, L / N, A]."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q / q.shape[-1] ** 0.5
        out, log_sum, kv = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf), torch.stack([k, v])
        for _ in range(dist.get_world_size()):
            scores = q @ kv[0].mT
            block_sum = scores.logsumexp(-1, keepdim=True)
            new_sum = torch.logaddexp(log_sum, block_sum)
            out = out * (log_sum - new_sum).exp() + (scores - new_sum).exp() @ kv[1]
            log_sum, kv = new_sum, passed_on(kv)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sum = ctx.saved_tensors
        inner, grad_q, kv = (grad * out).sum(-1, keepdim=True), torch.zeros_like(q), torch.stack([k, v])
        grad_kv = torch.zeros_like(kv)
        for _ in range(dist.get_world_size()):
            weights = (q @ kv[0].mT - log_sum).exp()
            grad_scores = weights * (grad @ kv[1].mT - inner)
            grad_q = grad_q + grad_scores @ kv[0]
            grad_kv = grad_kv + torch.stack([grad_scores.mT @ q, weights.mT @ grad])
            kv, grad_kv = passed_on(torch.stack([kv, grad_kv]))
        return grad_q / q.shape[-1] ** 0.5, *grad_kv


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(RingAttention.apply(q, k, v).transpose(1, 2).flatten(2))


def train():
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = Layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = (torch.randn(BATCH, LENGTH, WIDTH).chunk(ranks, dim=1)[rank] for _ in range(2))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        optimizer.step()
        return loss

    return step


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()().item())
    dist.destroy_process_group()
