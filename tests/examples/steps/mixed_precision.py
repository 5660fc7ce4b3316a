"""A training step under FSDP2 in bfloat16, offloaded to the host: a norm in float32, clipped gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, BATCH = 2, 64, 8


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.feed_forward, x, use_reentrant=False)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(self.norm(x))))


def train():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = (torch.randn(BATCH, WIDTH).chunk(mesh.size())[mesh.get_rank()] for _ in range(2))

    def step() -> Tensor:
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()().item())
    dist.destroy_process_group()
