"""A training step with data parallelism by hand: an all-reduce of each gradient; needs torch only."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAYERS, WIDTH, BATCH = 4, 64, 8


def train():
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (part.chunk(ranks)[rank] for part in (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)))

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
